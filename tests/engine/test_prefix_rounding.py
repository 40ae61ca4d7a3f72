"""What a hit changes in float32: nothing where chunks end at the same tokens, else what chunk sizes alone do."""

from __future__ import annotations

import random

import pytest
from tests.engine.embedded_engine import BLOCK, engine
from tests.helpers.engine_fixtures import frame

from headway.core.request import SamplingParams
from headway.runtime.engine.core import EngineCore
from headway.runtime.engine.protocol import SubmitRequest

CHUNK = 96
"""Of the helper's engine; a multiple of its blocks."""
ROUNDING = 2e-3
"""In log-probability. Attention scores of the embedded model reach 670, where float32 resolves 6e-5, and a score's
error is a log-probability's."""


def scores(core: EngineCore, name: str, prompt: list[int], output: int) -> list[dict[int, float]]:
    """Serve a prompt and return the log-probabilities of the likeliest tokens of each step."""
    params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True, logprobs=5)
    message = SubmitRequest(id=name, prompt_tokens=len(prompt), params=params, received_s=0.0)
    assert core.submit(message, frame(prompt)) is None
    steps: list[dict[int, float]] = []
    while not core.idle:
        for delta in core.step():
            steps += [dict(each.top) for each in delta.logprobs or ()]
    return steps


def prompts(shared: int, own: int) -> tuple[list[int], list[int]]:
    rng = random.Random(shared)
    document = [rng.randrange(200) for _ in range(shared)]
    first = [*document, rng.randrange(200)]
    return first, [*document, *(rng.randrange(200) for _ in range(own))]


@pytest.mark.parametrize("shared", [CHUNK, 4 * CHUNK])
@pytest.mark.parametrize("own", [1, 5, CHUNK, CHUNK + 40])
def test_after_a_hit_that_ends_with_a_chunk_every_score_is_bit_for_bit_that_without_a_cache(
    shared: int, own: int
) -> None:
    first, second = prompts(shared, own)
    plain, cached = engine(4096), engine(4096, prefix_cache=True)
    expected = [scores(plain, "first", first, 1), scores(plain, "second", second, 6)]
    assert [scores(cached, "first", first, 1), scores(cached, "second", second, 6)] == expected
    cache = cached.scheduler.block_managers[0].cache
    assert cache is not None
    assert cache.hit_tokens == shared
    plain.executor.close()
    cached.executor.close()


@pytest.mark.parametrize("shared", [BLOCK, CHUNK + BLOCK, 3 * CHUNK - BLOCK])
def test_after_any_other_hit_scores_differ_by_rounding_only(shared: int) -> None:
    first, second = prompts(shared, 150)
    plain, cached = engine(4096), engine(4096, prefix_cache=True)
    scores(cached, "first", first, 1)
    for step, expected in zip(scores(cached, "second", second, 1), scores(plain, "second", second, 1), strict=True):
        common = step.keys() & expected.keys()
        assert len(common) >= 4
        assert all(step[token] == pytest.approx(expected[token], abs=ROUNDING) for token in common)
    plain.executor.close()
    cached.executor.close()
