"""What hangs on who draws, and on several batches in flight, over virtual ranks. Parity by family: test_families_*."""

from __future__ import annotations

from typing import Any

import pytest
from tests.helpers.greedy_reference import prompt_of
from tests.helpers.marks import quick_first
from tests.parallel.model_families import checkpoint, expected, layout_of, single
from tests.parallel.rank_serving import Ask, make_core, serve
from tests.parallel.virtual_ranks import VirtualWorld

from headway.perf.hardware import ParallelLayout
from headway.runtime.engine.core import EngineCore

LAYOUTS = ("T2", "S2", "T2S2", "T4S3", "K2", "T2S2K2")
SPREAD = {"kv_shard_tokens": 40, "chunking": "static:16"}
"""A request of more than 40 tokens goes from one KV group to the next, where there are several."""


def core_of(world: VirtualWorld, blocks: int = 64, **more: Any) -> EngineCore:
    layout = world.executor.layout
    return make_core(world.executor, blocks, stages=layout.stages, kv_parallel=layout.kvp, **SPREAD, **more)


@pytest.mark.parametrize("name", LAYOUTS)
def test_sampled_penalised_and_reported_tokens_equal_one_process(name: str) -> None:
    """Draws, penalties over prompt and output, log-probabilities: all on one rank, which must know enough for them. A
    KV group that takes over must know what was generated before: penalties count it."""
    folder, joined = checkpoint("qwen2"), set[str]()
    asks = [
        Ask(prompt_of(0, 60), 12, 0, {"temperature": 0.9, "top_p": 0.9, "seed": 7}),
        Ask(prompt_of(1, 30), 32, 1, {"repetition_penalty": 1.3}),
        Ask(prompt_of(2, 33), 32, 2, {"frequency_penalty": 0.5, "presence_penalty": 0.3, "logit_bias": {9: 2.0}}),
        Ask(prompt_of(3, 9), 12, 3, {"temperature": 1.2, "seed": 3, "logprobs": 4}),
    ]
    wanted = single(folder, asks, chunking="static:16")
    with VirtualWorld(folder, layout_of(name)) as world:
        core = core_of(world, log=lambda kind, fields: joined.update(join[1] for join in fields.get("joins", ())))
        assert serve(core, asks) == wanted
    assert joined == ({"0", "1", "2"} if "K" in name else set())


@pytest.mark.parametrize("name", quick_first(["S3", "T2S2", "K2", "S2K2"]))
def test_requests_that_are_recomputed_for_want_of_memory_stay_exact(name: str) -> None:
    """Small pools: they come back with what they have generated, long ones perhaps in another group, and go on."""
    asks = [Ask(prompt_of(i, 40), 60, i) for i in range(6)]
    blocks = 16 if "K" in name else 40
    with VirtualWorld(checkpoint("llama"), layout_of(name), kv_blocks=blocks) as world:
        core = core_of(world, blocks)
        got = serve(core, asks)
        assert core.stats().preemptions_total > 0
    assert got == [expected("llama", i, 40, 60) for i in range(6)]


@pytest.mark.parametrize("blocks", [32, 256], ids=["a small pool", "a large pool"])
@pytest.mark.parametrize("name", quick_first(["T2", "S3", "T2S2"], 2))
def test_ranks_share_cached_prefixes_and_compute_the_same_tokens(name: str, blocks: int) -> None:
    """Documents that others have read, or read at the same time, answers included; with evictions in the small pool."""
    folder = checkpoint("llama")
    documents = [prompt_of(seed, 90) for seed in range(3)]
    asks = [Ask([*documents[i % 3], *prompt_of(50 + i, 3 + i)], 12, 4 * (i // 3)) for i in range(9)]
    wanted = single(folder, asks, chunking="static:16")
    with VirtualWorld(folder, layout_of(name), kv_blocks=blocks) as world:
        core = core_of(world, blocks, cached=True)
        assert serve(core, asks) == wanted
        cache = core.scheduler.block_managers[0].cache
        assert cache is not None
        assert cache.hit_tokens >= 3 * 80


@pytest.mark.parametrize("stages", [2, 3])
def test_a_stage_computes_the_next_chunk_of_a_prompt_while_later_stages_compute_this_one(stages: int) -> None:
    """Stream pipeline (Medha §3.3): no stage but the first begins a chunk before the stage in front of it has sent the
    next one. A pipeline that serialised chunks would stand still."""
    chunks = 6
    with VirtualWorld(checkpoint("llama"), ParallelLayout(stages=stages)) as world:
        for stage in range(1, stages):
            world.exchange.hold_rows(stage - 1, stage, chunks, wait_s=5.0)
        core = make_core(world.executor, stages=stages, chunking=f"static:{96 // chunks}")
        assert serve(core, [Ask(prompt_of(0, 96), 1)], wait_s=0.005) == [expected("llama", 0, 96, 1)]


def test_decodes_of_several_batches_alternate_between_stages() -> None:
    """With three stages three groups of decodes are in flight; each request's tokens are its own."""
    folder = checkpoint("phi3")
    asks = [Ask(prompt_of(i, 5 + i), 30, 2 * i) for i in range(9)]
    with VirtualWorld(folder, ParallelLayout(stages=3)) as world:
        got = serve(make_core(world.executor, stages=3), asks)
    assert got == [expected("phi3", i, 5 + i, 30) for i in range(9)]
