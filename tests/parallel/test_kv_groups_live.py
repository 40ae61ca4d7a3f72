"""KV parallelism changes nothing but where keys lie: tokens equal one process, whatever the shards and the company."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.helpers.greedy_reference import prompt_of
from tests.helpers.marks import quick_first
from tests.parallel.model_families import checkpoint, expected
from tests.parallel.rank_serving import Ask, make_core, serve
from tests.parallel.virtual_ranks import VirtualWorld

from headway.core.request import SamplingParams
from headway.perf.hardware import ParallelLayout
from headway.runtime.engine.protocol import SubmitRequest
from headway.sim.report.perfetto import engine_trace


class Joins:
    """A log that keeps who joined whom: (group, request, first token); all events, for replay; and what was said."""

    def __init__(self) -> None:
        self.got: list[list[int]] = []
        self.joins: list[tuple[int, str, int]] = []
        self.assists = 0
        self.events: list[dict[str, Any]] = []

    def __call__(self, kind: str, fields: dict[str, object]) -> None:
        event = msgspec.json.decode(msgspec.json.encode({"event": kind, **fields}))
        self.events.append(event)
        self.joins += [tuple(join) for join in event.get("joins", ())]
        self.assists += len(event.get("assists", ()))


def spread(world: VirtualWorld, layout: ParallelLayout, asks: list[Ask], blocks: int = 64, **scheduler: Any) -> Joins:
    """Serve over KV groups: what was said, and what the log says of it."""
    told = Joins()
    core = make_core(world.executor, blocks, log=told, stages=layout.stages, kv_parallel=layout.kvp, **scheduler)
    told.got = serve(core, asks)
    return told


def test_a_decode_that_fills_its_shard_goes_on_in_the_next_group() -> None:
    """The prompt fits one shard, its answer all three: each of the others takes over in the midst of the answer."""
    layout = ParallelLayout(kvp=3, stages=2)
    with VirtualWorld(checkpoint("llama"), layout) as world:
        told = spread(world, layout, [Ask(prompt_of(0, 30), 80)], kv_shard_tokens=40)
    assert told.got == [expected("llama", 0, 30, 80)]
    assert [start for _, _, start in told.joins] == [40, 80]
    assert len({group for group, _, _ in told.joins}) == 2


def test_two_long_requests_attend_in_each_others_groups() -> None:
    """Each group owns the rows of one and attends those of the other, in the same batch and layer."""
    layout = ParallelLayout(tp=2, kvp=2)
    asks = [Ask(prompt_of(0, 70), 20), Ask(prompt_of(1, 75), 20), Ask(prompt_of(2, 10), 30, 3)]
    with VirtualWorld(checkpoint("llama"), layout) as world:
        told = spread(world, layout, asks, kv_shard_tokens=40, chunking="static:16")
    wanted = [expected("llama", i, len(ask.prompt), ask.count) for i, ask in enumerate(asks)]
    assert told.got == wanted
    both = [{(group, owner) for group, _, _, owner in event.get("assists", ())} for event in told.events]
    assert {(0, 1), (1, 0)} in both


def test_shorts_are_served_by_all_groups_beside_a_long_request() -> None:
    layout = ParallelLayout(kvp=2)
    asks = [Ask(prompt_of(0, 110), 30), *(Ask(prompt_of(i, 9 + i), 12, i) for i in range(1, 9))]
    with VirtualWorld(checkpoint("llama"), layout) as world:
        told = spread(world, layout, asks, kv_shard_tokens=64)
    wanted = [expected("llama", i, len(ask.prompt), ask.count) for i, ask in enumerate(asks)]
    assert told.got == wanted
    homes = {
        group
        for event in told.events
        if event["event"] == "batch"
        for group, _, chunks, _ in event["parts"]
        if any(name != "0" for name, _, _ in chunks)
    }
    assert homes == {0, 1}
    drawn = engine_trace(told.events).events
    (join,) = (event for event in drawn if event["ph"] == "i")
    assert (join["name"], join["args"]) == (f"group {join['pid'] - 1} joins 0", {"from_token": 72})
    slices = [one for one in drawn if one["ph"] == "X"]
    own = [one for one in slices if any(part.startswith("0[") for part in one["args"]["chunks"].split(", "))]
    assert {one["pid"] for one in own} == {1, 2}
    assert join["ts"] == min(one["ts"] for one in own if one["pid"] == join["pid"])
    assert any("assisted" in one["name"] for one in slices)


# -- what goes wrong -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", quick_first(range(4)))
def test_aborts_at_any_moment_leave_no_blocks_and_disturb_no_request(seed: int) -> None:
    """Also between the moment when a group joins and its first batch with the request, and with the id used again."""
    rng = random.Random(seed)
    layout = ParallelLayout(stages=rng.choice((1, 2)), kvp=rng.choice((2, 3)))
    told: dict[str, list[int]] = {}
    lengths: dict[str, int] = {}
    with VirtualWorld(checkpoint("llama"), layout, kv_blocks=24) as world:
        core = make_core(
            world.executor, 24, stages=layout.stages, kv_parallel=layout.kvp, kv_shard_tokens=40, chunking="static:16"
        )
        ended: set[str] = set()
        for step in range(4000):
            if step < 120 and len(told) - len(ended) < 6 and rng.random() < 0.4:
                name = f"r{rng.randrange(8)}"
                if name not in told or name in ended:
                    lengths[name] = rng.randint(3, 90)
                    params = SamplingParams(max_tokens=rng.randint(1, 30), temperature=0.0, ignore_eos=True)
                    prompt = np.array(prompt_of(lengths[name], lengths[name]), dtype=np.int32)
                    submit = SubmitRequest(id=name, prompt_tokens=len(prompt), params=params, received_s=0.0)
                    if core.submit(submit, memoryview(prompt.tobytes())) is None:
                        told[name] = []
                        ended.discard(name)
            alive = [name for name in told if name not in ended]
            if alive and rng.random() < 0.05:
                name = rng.choice(alive)
                core.abort(name)
                ended.add(name)
                del told[name]
            for delta in core.step():
                assert delta.error is None, delta
                if delta.id in told:
                    told[delta.id] += delta.tokens
                    if delta.finish is not None:
                        ended.add(delta.id)
                        wanted = expected("llama", lengths[delta.id], lengths[delta.id], len(told[delta.id]))
                        assert told[delta.id] == wanted
            core.scheduler.check()
            if step > 120 and core.idle:
                break
        assert core.idle
        assert all(block_manager.used_tokens == 0 for block_manager in core.scheduler.block_managers)
