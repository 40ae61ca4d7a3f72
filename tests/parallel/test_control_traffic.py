"""A plan is small at any context length, in one group and between several: nothing that travels grows with contexts but
new prompts."""

from __future__ import annotations

import msgspec
import pytest
from tests.parallel.echo_transport import EchoTransport
from tests.parallel.rank_serving import Ask, make_core, serve

from headway.perf.hardware import ParallelLayout
from headway.runtime.engine.protocol import SubmitRequest
from headway.runtime.executor.multi_process import MultiProcessExecutor
from headway.runtime.executor.plans import BatchPlan


def traffic(context: int, layout: ParallelLayout) -> tuple[float, dict[type, int]]:
    """Mean bytes a plan, and bytes by kind of message over all ranks, while six requests of that context prefill and
    decode, with nine shorts beside them. KV groups hold half of a long request each."""
    blocks = 8 * context // 64 + 64
    wire = EchoTransport(layout)
    executor = MultiProcessExecutor(wire, layout)
    core = make_core(
        executor, blocks, 64, stages=layout.stages, kv_parallel=layout.kvp, kv_shard_tokens=context // 2 + 64,
        chunking="static:512",
    )  # fmt: skip
    core.info = msgspec.structs.replace(core.info, max_model_len=2 * context)
    asks = [Ask([7] * context, 100, after=30 * i) for i in range(6)] + [
        Ask([5] * 40, 60, after=7 * i) for i in range(9)
    ]
    serve(core, asks)
    return executor.plan_bytes / executor.plans, wire.sent


@pytest.mark.parametrize(
    ("layout", "most"),
    [(ParallelLayout(stages=2), 64), (ParallelLayout(tp=2, stages=2), 64), (ParallelLayout(kvp=2), 128)],
)
def test_a_plan_is_small_and_does_not_grow_with_the_context(layout: ParallelLayout, most: int) -> None:
    sizes = {context: traffic(context, layout) for context in (1024, 8192, 65536)}
    for mean, sent in sizes.values():
        assert mean <= most, sizes
        assert sent[BatchPlan] > 0
    assert sizes[65536][0] <= sizes[1024][0] + 24  # more of the plans hold a chunk, and numbers have more digits
    readers = layout.tp * layout.kvp
    one_copy = readers * 4 * (6 * 65536 + 9 * 40)
    assert (
        one_copy <= sizes[65536][1][SubmitRequest] <= one_copy + 6000 * layout.accelerators
    )  # first stages keep prompts


def test_256_decodes_cost_their_changes_only() -> None:
    blocks = 4096
    executor = MultiProcessExecutor(EchoTransport(ParallelLayout(stages=2)), ParallelLayout(stages=2))
    core = make_core(executor, blocks, 64, stages=2, max_num_seqs=256)
    serve(core, [Ask([5] * 20, 200 + i) for i in range(256)])
    assert executor.plan_bytes / executor.plans <= 64
