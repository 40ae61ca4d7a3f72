"""Parity over real processes and gloo: five families, each degree of parallelism alone, two and three of them together.

Real processes are dear: each family meets each layout, chunking and schedule at least once. `test_families_virtual` has
the products.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.helpers.greedy_reference import prompt_of
from tests.helpers.marks import pairwise, quick_first
from tests.parallel.model_families import CHUNKINGS, FAMILIES, checkpoint, core_of, expected, layout_of
from tests.parallel.rank_processes import make_rank_config, rank_executor
from tests.parallel.rank_serving import Ask, reference, serve

from headway.core.request import TokenLogprobs

LAYOUTS = ("T2", "S2", "K2", "T2S2")
LONG = pytest.mark.long
EACH_ONCE = [*zip(FAMILIES, (*LAYOUTS, "T2"), (*CHUNKINGS, "static:7"), strict=True)]
TOP = 20
SHARD = 50


def world(family: str, name: str, dtype: str = "float32") -> Any:
    layout = layout_of(name)
    return rank_executor(make_rank_config(checkpoint(family, dtype), layout.tp, layout.stages, kvp=layout.kvp))


def check(family: str, name: str, chunking: str, schedule: str = "stream", dtype: str = "float32") -> None:
    """A long request with shorts beside it, and their log-probabilities. (Less long where tokens are iterations.)"""
    folder = checkpoint(family, dtype)
    lengths = (60, 20, 3) if chunking == "static:1" else (180, 20, 3)
    asks = [Ask(prompt_of(i, n), 8 + 2 * i, 3 * i, {"logprobs": TOP}) for i, n in enumerate(lengths)]
    reported: dict[str, list[TokenLogprobs]] = {str(i): [] for i in range(len(asks))}
    with world(family, name, dtype) as (executor, _):
        core = core_of(executor, SHARD, chunking=chunking, pipeline_schedule=schedule)
        got = serve(core, asks, hear=lambda delta: reported[delta.id].extend(delta.logprobs or ()))
    if dtype == "float32":
        assert got == [expected(family, i, len(ask.prompt), ask.count) for i, ask in enumerate(asks)]
    for ask, tokens, told in zip(asks, got, reported.values(), strict=True):
        hold(folder, ask.prompt, tokens, told, 1e-4 if dtype == "float32" else 0.12)


def hold(folder: Path, prompt: list[int], tokens: list[int], told: list[TokenLogprobs], bound: float) -> None:
    """The log-probabilities of the likeliest tokens are within twice `bound` of the largest logit of transformers', fed
    the tokens that were drawn; tokens whose margin exceeds the error are equal."""
    logits = reference(folder).logits(prompt + tokens[:-1])[len(prompt) - 1 :]
    wanted = logits.log_softmax(-1)
    clear = 0
    for row, token, one in zip(wanted, tokens, told, strict=True):
        error = max(abs(float(row[index]) - value) for index, value in one.top)
        assert len(one.top) == TOP
        assert error <= 2 * bound * float(logits.abs().max())
        first, second = row.topk(2).values.tolist()
        if first - second > 2 * error:
            clear += 1
            assert token == int(row.argmax())
    assert clear


@pytest.mark.parametrize(("family", "name", "chunking"), EACH_ONCE)
def test_tokens_and_logprobs_equal_transformers(family: str, name: str, chunking: str) -> None:
    check(family, name, chunking)


@pytest.mark.parametrize("name", quick_first(LAYOUTS[::-1]))
def test_bf16_is_within_a_bound(name: str) -> None:
    check("llama", name, "adaptive", dtype="bfloat16")


@LONG
@pytest.mark.parametrize(
    ("name", "family", "chunking", "schedule"),
    pairwise([*LAYOUTS, "S3", "S2K2", "T2K2", "T2S2K2"], FAMILIES, CHUNKINGS, ("stream", "microbatch")),
)
def test_logits_are_equal_in_every_chunking_and_schedule(name: str, family: str, chunking: str, schedule: str) -> None:
    check(family, name, chunking, schedule)


@LONG
@pytest.mark.parametrize(("family", "name"), [*zip(FAMILIES[1:], LAYOUTS, strict=True)])
def test_bf16_of_every_family_is_within_a_bound(family: str, name: str) -> None:
    check(family, name, "adaptive", dtype="bfloat16")
