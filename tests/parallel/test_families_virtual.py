"""Parity over virtual ranks: five families, every product of tensor, pipeline and KV parallelism, chunkings and
neighbours that hypothesis picks. Greedy fp32 tokens equal transformers'; logits are within a bound."""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tests.helpers.greedy_reference import prompt_of
from tests.helpers.marks import pairwise
from tests.parallel.model_families import (
    BLOCK,
    BLOCKS,
    CHUNKINGS,
    FAMILIES,
    checkpoint,
    core_of,
    expected,
    layout_of,
    single,
)
from tests.parallel.rank_serving import Ask, reference, serve
from tests.parallel.virtual_ranks import VirtualWorld

LAYOUTS = ("T2", "S2", "T2S2", "T4", "S4", "T2S4", "K2", "T2K2", "S2K2", "T2S2K2")
LARGER = ("T4S2", "T4S4", "K4", "S3K3", "T4S2K2")
"""With two KV heads, T4 copies each to two ranks; five layers make stages of unequal size."""
EACH_ONCE = [(FAMILIES[number % len(FAMILIES)], name) for number, name in enumerate(LAYOUTS)]
"""Each layout, and each family twice."""
TWICE = [
    (FAMILIES[(number + shift) % len(FAMILIES)], name)
    for number, name in enumerate((*LAYOUTS, *LARGER))
    for shift in (1, 3)
]
"""Each layout with two families; with all of them: `test_logits_equal_transformers_in_every_chunking`."""
LONG = pytest.mark.long
PHASES = (Phase.explicit, Phase.generate)
"""Cases are small as they come, and each costs a world: no shrinking."""


CASES = {
    "length": st.integers(70, 150),
    "shorts": st.lists(st.tuples(st.integers(1, 40), st.integers(0, 12)), min_size=1, max_size=3),
    "chunking": st.sampled_from(CHUNKINGS),
    "schedule": st.sampled_from(("stream", "microbatch")),
    "shard": st.integers(9, 90),
}


def check(
    family: str, name: str, length: int, shorts: list[tuple[int, int]], chunking: str, schedule: str, shard: int
) -> None:
    """A long request with shorts beside it: (length, step of arrival) each. Shards end anywhere."""
    if chunking == "static:1":
        length //= 3  # as many iterations as tokens
    joins: list[object] = []
    asks = [Ask(prompt_of(0, length), 6), *(Ask(prompt_of(i + 1, n), 8, at) for i, (n, at) in enumerate(shorts))]
    with VirtualWorld(checkpoint(family), layout_of(name), BLOCKS) as world:
        core = core_of(
            world.executor,
            shard,
            lambda kind, fields: joins.extend(fields.get("joins", ())),
            chunking=chunking,
            pipeline_schedule=schedule,
        )
        got = serve(core, asks)
        assert len(joins) >= min(world.executor.layout.kvp - 1, (length - 1) // (shard + BLOCK))
    assert got == [expected(family, i, len(ask.prompt), ask.count) for i, ask in enumerate(asks)]


@pytest.mark.parametrize(("family", "chunking"), [*zip(FAMILIES, (*CHUNKINGS, "static:17"), strict=True)])
def test_one_process_says_what_transformers_does(family: str, chunking: str) -> None:
    asks = [Ask(prompt_of(0, 90), 8), Ask(prompt_of(1, 20), 12, 2)]
    wanted = [expected(family, i, len(ask.prompt), ask.count) for i, ask in enumerate(asks)]
    assert single(checkpoint(family), asks, chunking=chunking) == wanted


@pytest.mark.parametrize(("family", "name"), EACH_ONCE)
@settings(max_examples=2, phases=PHASES)
@given(**CASES)
def test_greedy_tokens_equal_with_shorts_beside_a_long_request(
    family: str, name: str, length: int, shorts: list[tuple[int, int]], chunking: str, schedule: str, shard: int
) -> None:
    check(family, name, length, shorts, chunking, schedule, shard)


@LONG
@pytest.mark.parametrize(("family", "name"), TWICE)
@settings(max_examples=3, phases=PHASES)
@given(**CASES)
def test_greedy_tokens_equal_in_many_more_cases(
    family: str, name: str, length: int, shorts: list[tuple[int, int]], chunking: str, schedule: str, shard: int
) -> None:
    check(family, name, length, shorts, chunking, schedule, shard)


def heads_of(world: VirtualWorld) -> list[torch.Tensor]:
    """The rows of logits that sampling ranks compute from now on, in order."""
    seen: list[torch.Tensor] = []

    def listen(plain: object, hidden: torch.Tensor) -> torch.Tensor | None:
        logits: torch.Tensor | None = plain(hidden)
        assert logits is not None
        seen.extend(logits.clone())
        return logits

    for worker in world.workers:
        if worker.decoder.shard.last and worker.decoder.shard.rank == 0:
            plain = worker.decoder.head
            worker.decoder.head = lambda hidden, plain=plain: listen(plain, hidden)  # type: ignore[method-assign]
    return seen


def forced(family: str, dtype: str, name: str, chunking: str) -> None:
    """fp32: within 1e-4 of the largest logit. bf16: within 0.12 of it, and tokens whose margin exceeds the error are
    equal. The reference is fed the tokens that were drawn, and computes in fp32 with the same weights."""
    folder = checkpoint(family, dtype)
    prompt, count = prompt_of(3, 90), 12
    with VirtualWorld(folder, layout_of(name), BLOCKS, dtype=dtype) as world:
        rows = heads_of(world)
        (tokens,) = serve(core_of(world.executor, 40, chunking=chunking), [Ask(prompt, count)])
    got = torch.stack(rows)
    wanted = reference(folder).logits(prompt + tokens[:-1])[len(prompt) - 1 :]
    error, largest = (got - wanted).abs(), float(wanted.abs().max())
    assert got.shape == wanted.shape
    assert float(error.max()) <= (1e-4 if dtype == "float32" else 0.12) * largest
    top = wanted.topk(2, dim=-1).values
    clear = top[:, 0] - top[:, 1] > 2 * error.amax(-1)
    assert bool(clear.any())
    assert torch.equal(torch.tensor(tokens)[clear], wanted.argmax(-1)[clear])


@pytest.mark.parametrize(("family", "name"), EACH_ONCE)
def test_logits_equal_transformers(family: str, name: str) -> None:
    forced(family, "float32", name, "static:17")


@pytest.mark.parametrize(("family", "name"), [*zip(FAMILIES, ("T4", "S4", "T2S2K2", "T4", "S4"), strict=True)])
def test_bf16_logits_are_within_a_bound_and_clear_tokens_equal(family: str, name: str) -> None:
    forced(family, "bfloat16", name, "static:17")


@LONG
@pytest.mark.parametrize(
    ("name", "family", "chunking", "dtype"),
    pairwise([*LAYOUTS, *LARGER], FAMILIES, CHUNKINGS, ("float32", "bfloat16")),
)
def test_logits_equal_transformers_in_every_chunking(name: str, family: str, chunking: str, dtype: str) -> None:
    forced(family, dtype, name, chunking)
