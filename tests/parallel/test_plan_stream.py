"""Plans are deltas that lead both ends to the same state, cost the same at any context length, and never mislead."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.checkpoints import make_tiny
from tests.helpers.greedy_reference import prompt_of
from tests.parallel.echo_transport import EchoTransport
from tests.parallel.rank_serving import Ask, make_core, serve
from tests.parallel.virtual_ranks import VirtualWorld

from headway.core.batch import Chunk, DecodeGroup, GroupBatch, KvOp
from headway.core.request import SamplingParams
from headway.perf.hardware import ParallelLayout
from headway.runtime.engine.liveness import IterationDeadline
from headway.runtime.executor.multi_process import MultiProcessExecutor
from headway.runtime.executor.plans import REMEMBERED_EPOCHS, BatchPlan, PlanReader, PlanWriter, RankLostError, ToRank


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(20, 200))
def test_groups_and_operations_arrive_as_they_are(seed: int, sets: int, steps: int) -> None:
    """Several groups of decodes that change between their turns, some of them forgotten before they come back."""
    rng = random.Random(seed)
    numbers: dict[str, int] = {}
    writer, state = PlanWriter(numbers), PlanReader()
    alive: list[dict[str, None]] = [{} for _ in range(sets)]
    last = [DecodeGroup()] * sets
    held: list[str] = []
    for step in range(1, steps):
        turn = rng.randrange(sets) if rng.random() < 0.5 else 0
        members = alive[turn]
        left = tuple(name for name in list(members) if rng.random() < 0.2)
        for name in left:
            del members[name]
        joined = tuple(f"r{step}.{i}" for i in range(rng.choice((0, 0, 1, 3))))
        for name in joined:
            numbers[name] = len(numbers) + 1
            members[name] = None
        group = last[turn]
        if joined or left:
            group = DecodeGroup(tuple(members), step, step, group.epoch, joined, left)
        last[turn] = group
        ops = []
        if rng.random() < 0.4 and len(held) < 20:
            name = f"h{step}"
            numbers[name] = len(numbers) + 1
            held.append(name)
            if rng.random() < 0.5:
                ops.append(KvOp("share", name, 2, runs=((step, 1), (3, 1))))
            ops.append(KvOp("reserve", name, rng.randint(1, 3)))
        if held and rng.random() < 0.4:
            kept = ((step, 2),) if rng.random() < 0.5 else ()
            ops.append(KvOp("free", held.pop(rng.randrange(len(held))), 0, runs=kept))
        if rng.random() < 0.2:
            ops.append(KvOp("evict", "", 0, runs=((step, 1),)))
        part = GroupBatch(0, group, (Chunk(held[0], 0, step, False),) if held else (), tuple(ops))
        plan = msgspec.msgpack.decode(msgspec.msgpack.encode(writer.write(part)), type=BatchPlan)
        got = state.part_of(plan)
        assert got.decodes.members == tuple(str(numbers[name]) for name in group.members)
        assert [(c.request, c.tokens) for c in got.prefills] == [(str(numbers[c.request]), step) for c in part.prefills]
        said = [(op.verb.replace("grow", "reserve"), op.request, op.blocks, op.runs) for op in got.kv_ops]
        assert said == [(op.verb, str(numbers.get(op.request, 0)), op.blocks, op.runs) for op in ops]


def test_a_group_that_was_forgotten_is_sent_in_full() -> None:
    numbers = {f"r{i}": i for i in range(1, 200)}
    writer, state = PlanWriter(numbers), PlanReader()
    old = DecodeGroup(("r1", "r2"), 2, 1, 0, ("r1", "r2"))
    groups = [old, *(DecodeGroup((f"r{i}",), 1, i, 0, (f"r{i}",)) for i in range(3, 4 + REMEMBERED_EPOCHS))]
    groups.append(DecodeGroup(("r2", "r99"), 2, 150, 1, ("r99",), ("r1",)))
    for group in groups:
        plan = writer.write(GroupBatch(0, group))
        assert state.part_of(plan).decodes.members == tuple(str(numbers[name]) for name in group.members)
    assert (plan.base, plan.joined) == (0, (2, 99))


def test_an_id_that_is_used_again_does_not_free_the_blocks_of_its_successor() -> None:
    numbers = {"a": 1}
    writer = PlanWriter(numbers)
    writer.write(GroupBatch(0, DecodeGroup(), (), (KvOp("reserve", "a", 2),)))
    numbers["a"] = 2
    plan = writer.write(GroupBatch(0, DecodeGroup(), (), (KvOp("free", "a", 0), KvOp("reserve", "a", 3))))
    assert plan.ops == ((1, 0, 0, ()), (2, 3, 0, ()))


def test_a_new_request_has_its_own_number_with_cached_blocks_or_without() -> None:
    numbers = {"a": 1}
    writer = PlanWriter(numbers)
    writer.write(GroupBatch(0, DecodeGroup(), (), (KvOp("reserve", "a", 2),)))
    numbers["a"] = 2  # the engine of the first one has ended with blocks that no plan has freed
    assert writer.write(GroupBatch(0, DecodeGroup(), (), (KvOp("reserve", "a", 3),))).ops == ((2, 3, 0, ()),)
    cached = KvOp("share", "b", 1, runs=((7, 1),)), KvOp("evict", "", 0, runs=((9, 2),)), KvOp("reserve", "b", 2)
    ops = writer.write(GroupBatch(0, DecodeGroup(), (), cached)).ops
    assert ops == ((-1, 1, 0, ((7, 1),)), (0, 0, 0, ((9, 2),)), (-1, 2, 0, ()))


def test_blocks_that_become_a_request_s_own_keep_their_number() -> None:
    """Reassigning blocks, as of spans, changes nothing at the ranks."""
    numbers: dict[str, int] = {}
    writer = PlanWriter(numbers)
    (reserved,) = writer.write(GroupBatch(0, DecodeGroup(), (), (KvOp("reserve", "a/spans", 2),))).ops
    assert writer.write(GroupBatch(0, DecodeGroup(), (), (KvOp("reassign", "a", 0, before="a/spans"),))).ops == ()
    number = writer.holder_number("a")
    assert number == reserved[0] < 0
    numbers["a"] = number
    assert writer.holder_number("a/spans") is None
    ops = (KvOp("grow", "a", 1), KvOp("free", "a", 0))
    assert writer.write(GroupBatch(0, DecodeGroup(), (), ops)).ops == ((number, 1, 0, ()), (number, 0, 0, ()))


# -- what goes wrong -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("llama"))


ASKS = [Ask(prompt_of(1, 120), 12), Ask(prompt_of(2, 20), 20, 2), Ask(prompt_of(3, 5), 25, 5)]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("seq", [3, 9, -1])
def test_a_rank_that_has_missed_a_plan_is_lost(
    folder: Path, monkeypatch: pytest.MonkeyPatch, rank: int, seq: int
) -> None:
    """In the midst, which the next plan shows, or silence; or the newest one, which silence shows."""
    # The other rank waits for rows that never come.
    monkeypatch.setattr("tests.parallel.virtual_ranks.WAIT_S", 1.0)
    with VirtualWorld(folder, ParallelLayout(stages=2)) as world:

        def tamper(target: int, frames: object) -> object:
            message = msgspec.msgpack.decode(frames[0], type=ToRank)  # type: ignore[index]
            lost = isinstance(message, BatchPlan) and (message.seq == seq or (seq < 0 and message.seq >= 6))
            return None if target == rank and lost else frames

        world.wire.tamper = tamper  # type: ignore[assignment]
        world.executor._deadline = IterationDeadline(0.3, 0.0)
        with pytest.raises(
            RankLostError, match=f"worker {rank} (failed: InvariantError: plan|has carried out nothing)"
        ):
            serve(make_core(world.executor, stages=2, chunking="static:16"), ASKS)


def test_prompts_go_only_where_tokens_are_read() -> None:
    layout = ParallelLayout(tp=2, stages=3)
    sent: list[tuple[int, int]] = []

    class Listening(EchoTransport):
        def send(self, rank: int, frames: object) -> None:
            sent.append((rank, len(frames)))
            super().send(rank, frames)

    executor = MultiProcessExecutor(Listening(layout), layout)
    prompt = memoryview(np.arange(10, dtype=np.int32).tobytes())
    executor.admit("a", prompt, SamplingParams())
    assert [rank for rank, frames in sent if frames == 2] == [0, 1]
    sent.clear()
    executor.admit("b", prompt, SamplingParams(repetition_penalty=1.2))
    assert [rank for rank, frames in sent if frames == 2] == [0, 1, 4]
