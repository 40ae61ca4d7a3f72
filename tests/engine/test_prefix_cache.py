"""The engine with a prefix cache on the embedded model: the same tokens in fp32, and less to compute."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from tests.engine.embedded_engine import BLOCK, answers, engine, submit
from tests.helpers.engine_fixtures import frame

from headway.core.batch import ManualClock
from headway.core.request import Phase, SamplingParams
from headway.runtime.engine.core import EngineCore
from headway.runtime.engine.protocol import SubmitRequest
from headway.sim.replay import replay


def questions(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    documents = [[rng.randrange(200) for _ in range(rng.randrange(100, 400))] for _ in range(3)]
    return [[*rng.choice(documents), *(rng.randrange(200) for _ in range(rng.randrange(1, 30)))] for _ in range(12)]


@pytest.fixture(scope="module")
def plain() -> Iterator[EngineCore]:
    core = engine(4096)
    yield core
    core.executor.close()


@pytest.mark.parametrize("kv_tokens", [640, 4096], ids=["a small pool", "a large pool"])
def test_greedy_tokens_are_those_of_an_engine_without_a_cache(plain: EngineCore, kv_tokens: int) -> None:
    core = engine(kv_tokens, prefix_cache=True)
    for seed in range(3):
        prompts = questions(seed)
        expected = answers(plain, prompts)
        assert answers(core, prompts) == expected
        assert answers(core, prompts[::-1]) == expected[::-1]
    cache = core.scheduler.block_managers[0].cache
    assert cache is not None
    assert cache.hit_tokens > 1000
    core.executor.close()


def test_salted_and_uncached_requests_never_hit() -> None:
    core = engine(4096, prefix_cache=True)
    cache = core.scheduler.block_managers[0].cache
    assert cache is not None
    prompts = questions(0)[:1]
    expected = answers(core, prompts)
    assert answers(core, prompts, cache_salt="tenant") == expected
    assert answers(core, prompts, prefix_cache=False) == expected
    assert cache.hit_tokens == 0
    assert answers(core, prompts) == expected
    assert cache.hit_tokens > 0
    core.executor.close()


@pytest.mark.parametrize("policy", ["lru", "cost"])
def test_the_next_turn_hits_the_whole_turn_before(plain: EngineCore, policy: str) -> None:
    core = engine(4096, prefix_cache=True, prefix_cache_policy=policy)
    rng = random.Random(5)
    text = [rng.randrange(200) for _ in range(150)]
    for _ in range(4):
        (answer,) = answers(core, [text], output=40)
        assert answers(plain, [text], output=40) == [answer]
        # KV of the last token of an answer is never computed.
        known = (len(text) + 39) // BLOCK * BLOCK
        text += [*answer, *(rng.randrange(200) for _ in range(20))]
        submit(core, "peek", text, 1)
        cache = core.scheduler.block_managers[0].cache
        assert cache is not None
        assert cache.cached_tokens("peek") == known
        core.abort("peek")
    core.executor.close()


def test_a_first_token_says_what_was_cached() -> None:
    core = engine(4096, prefix_cache=True)
    prompt = questions(0)[0]
    answers(core, [prompt])
    submit(core, "again", prompt, 2)
    first, second = (delta for _ in range(9) if not core.idle for delta in core.step())
    assert first.cached_tokens == (len(prompt) - 1) // BLOCK * BLOCK
    assert first.saved_s > 0
    assert second.cached_tokens == 0
    stats = core.stats()
    assert stats.prefix_hits_total == first.cached_tokens
    assert stats.prefix_queries_total == 2 * len(prompt)
    core.executor.close()


def test_prompt_that_is_to_be_scored_is_computed_whole() -> None:
    core = engine(4096, prefix_cache=True)
    prompt = questions(0)[0]
    answers(core, [prompt])
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    message = SubmitRequest(id="scored", prompt_tokens=len(prompt), params=params, received_s=0.0)
    assert core.submit(message, frame(prompt)) is None
    scored = []
    while not core.idle:
        scored += [delta.prompt_logprobs for delta in core.step() if delta.prompt_logprobs is not None]
    assert [len(one) for one in scored] == [len(prompt) - 1]
    core.executor.close()


def ask_phase(core: EngineCore, prompt: list[int], phase: Phase, told: tuple[int, ...] = ()) -> list[int]:
    """Serve a part of a request "a" and return its tokens."""
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    message = SubmitRequest(
        id="a", prompt_tokens=len(prompt), params=params, received_s=0.0, phase=phase, output=told
    )  # fmt: skip
    assert core.submit(message, frame(prompt)) is None
    said: list[int] = []
    while not core.idle:
        said += [token for delta in core.step() for token in delta.tokens]
    return said


def test_an_instance_caches_what_it_prefills_and_what_it_decodes(plain: EngineCore) -> None:
    core = engine(4096, prefix_cache=True)
    prompt = questions(0)[0]
    (expected,) = answers(plain, [prompt], output=40)
    for cached in (0, (len(prompt) - 1) // BLOCK * BLOCK):
        first = ask_phase(core, prompt, "prefill")
        assert core.staged[-1].id == "a"
        assert core.scheduler.block_managers[0].cache.hit_tokens == cached
        assert first + ask_phase(core, prompt, "decode", tuple(first)) == expected
        core.scheduler.check()
    submit(core, "peek", [*prompt, *expected, 1, 2], 1)
    cache = core.scheduler.block_managers[0].cache
    assert cache is not None
    assert cache.cached_tokens("peek") == (len(prompt) + 39) // BLOCK * BLOCK
    core.executor.close()


def test_a_prompt_computed_into_blocks_that_wait_for_it_takes_no_cached_tokens(plain: EngineCore) -> None:
    core = engine(4096, prefix_cache=True)
    prompt = questions(0)[0]
    expected = answers(plain, [prompt], output=8)
    assert answers(core, [prompt]) == expected
    staged = core.scheduler.staged_kv
    assert staged is not None
    # KV of another instance was to come here, and has not.
    staged.request("p0", len(prompt) + 8, 0.0)
    assert staged.admit() == ["p0"]
    ((block, count),) = core.scheduler.block_managers[0].where("p0")
    core.executor.worker.pool.data[:, :, :, block * BLOCK : (block + count) * BLOCK] = 7.0  # type: ignore[attr-defined]
    assert answers(core, [prompt]) == expected
    core.executor.close()


def hear(core: EngineCore, said: dict[str, list[int]]) -> None:
    """Take a step and note what was said."""
    for delta in core.step():
        said[delta.id] += delta.tokens


@pytest.mark.parametrize("policy", ["lru", "cost"])
def test_a_replay_decides_as_the_engine_did_with_what_it_had_cached(policy: str) -> None:
    lines: list[dict[str, Any]] = []

    def log(kind: str, fields: dict[str, object]) -> None:
        lines.append(msgspec.json.decode(msgspec.json.encode({"event": kind, **fields})))

    # A small pool: prompts and answers evict each other.
    made = engine(640, prefix_cache=True, prefix_cache_policy=policy)
    core = EngineCore(made.scheduler, made.executor, ManualClock(), made.info, log)
    rng, said = random.Random(3), dict[str, list[int]]()
    for seed in range(2):
        prompts = dict(enumerate([*questions(seed), *questions(seed)]))
        for turn in range(2):
            for number, prompt in prompts.items():
                name = f"{seed}-{turn}-{number}"
                said[name] = []
                submit(core, name, prompt, rng.randrange(1, 60), prefix_cache=rng.random() < 0.9)
                for _ in range(rng.randrange(3)):
                    hear(core, said)
                if rng.random() < 0.1:
                    core.abort(name)
            while not core.idle:
                hear(core, said)
            prompts = {number: [*text, *said[f"{seed}-{turn}-{number}"], 5] for number, text in prompts.items()}
    stats = core.stats()
    assert stats.prefix_hits_total > 1000
    core.executor.close()
    run = replay(lines)
    assert run.differences == []
    assert len(run.batches) == stats.iterations_total
    # Another cache than the recorded one is noticed.
    hit = next(number for number, line in enumerate(lines) if line.get("cached"))
    lines[hit]["keys"] = lines[hit]["keys"][::-1]
    assert f"{lines[hit]['request']} found {lines[hit]['cached']} tokens cached" in replay(lines).differences[0]
