"""What hangs on who draws, and on several batches in flight, over virtual ranks. Parity by family: test_families_*."""

from __future__ import annotations

import pytest
from tests.helpers.model_families import checkpoint, expected, single
from tests.helpers.rank_serving import Ask, make_core, prompt_of, serve
from tests.helpers.virtual_ranks import VirtualWorld

from headway.perf.hardware import ParallelLayout

LAYOUTS = ((2, 1), (1, 2), (2, 2), (4, 3))


@pytest.mark.parametrize(("tp", "stages"), LAYOUTS)
def test_sampled_penalised_and_reported_tokens_equal_one_process(tp: int, stages: int) -> None:
    """Draws, penalties over prompt and output, log-probabilities: all on one rank, which must know enough for them."""
    folder = checkpoint("qwen2")
    asks = [
        Ask(prompt_of(0, 60), 12, 0, {"temperature": 0.9, "top_p": 0.9, "seed": 7}),
        Ask(prompt_of(1, 30), 12, 1, {"repetition_penalty": 1.3}),
        Ask(prompt_of(2, 33), 12, 2, {"frequency_penalty": 0.5, "presence_penalty": 0.3, "logit_bias": {9: 2.0}}),
        Ask(prompt_of(3, 9), 12, 3, {"temperature": 1.2, "seed": 3, "logprobs": 4}),
    ]
    wanted = single(folder, asks, chunking="static:16")
    with VirtualWorld(folder, ParallelLayout(tp=tp, stages=stages)) as world:
        assert serve(make_core(world.executor, stages=stages, chunking="static:16"), asks) == wanted


@pytest.mark.parametrize(("tp", "stages"), [pytest.param(2, 2, marks=pytest.mark.long), (1, 3)])
def test_requests_that_are_recomputed_for_want_of_memory_stay_exact(tp: int, stages: int) -> None:
    folder = checkpoint("llama")
    asks = [Ask(prompt_of(i, 40), 60, i) for i in range(6)]
    with VirtualWorld(folder, ParallelLayout(tp=tp, stages=stages), kv_blocks=40) as world:
        core = make_core(world.executor, 40, stages=stages, chunking="static:16")
        got = serve(core, asks)
        assert core.stats().preemptions_total > 0
    assert got == [expected("llama", i, 40, 60) for i in range(6)]


@pytest.mark.parametrize("blocks", [32, 256], ids=["a small pool", "a large pool"])
@pytest.mark.parametrize(("tp", "stages"), [(2, 1), (1, 3), pytest.param(2, 2, marks=pytest.mark.long)])
def test_ranks_share_cached_prefixes_and_compute_the_same_tokens(tp: int, stages: int, blocks: int) -> None:
    """Documents that others have read, or read at the same time, answers included; with evictions in the small pool."""
    folder = checkpoint("llama")
    documents = [prompt_of(seed, 90) for seed in range(3)]
    asks = [Ask([*documents[i % 3], *prompt_of(50 + i, 3 + i)], 12, 4 * (i // 3)) for i in range(9)]
    wanted = single(folder, asks, chunking="static:16")
    with VirtualWorld(folder, ParallelLayout(tp=tp, stages=stages), kv_blocks=blocks) as world:
        core = make_core(world.executor, blocks, cached=True, stages=stages, chunking="static:16")
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
