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
from tests.helpers.echo_transport import EchoTransport
from tests.helpers.rank_serving import Ask, make_core, prompt_of, serve
from tests.helpers.virtual_ranks import VirtualWorld

from headway.core.batch import Chunk, DecodeGroup, GroupBatch, KvOp
from headway.core.sampling import SamplingParams
from headway.kv.block_allocator import BlockTables
from headway.perf.latency.layout import ParallelLayout
from headway.runtime.executor.messages import BatchPlan, ToRank
from headway.runtime.executor.multi_process import MultiProcessExecutor
from headway.runtime.executor.plan_stream import REMEMBERED_EPOCHS, PlanWriter, StreamState, replay
from headway.runtime.executor.rank_transport import RankLostError


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(20, 200))
def test_groups_and_tables_arrive_as_they_are(seed: int, sets: int, steps: int) -> None:
    """Several groups of decodes that change between their turns, some of them forgotten before they come back."""
    rng = random.Random(seed)
    numbers: dict[str, int] = {}
    writer, state = PlanWriter(64, numbers), StreamState(BlockTables(64))
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
            ops.append(KvOp("reserve", name, rng.randint(1, 3)))
        if held and rng.random() < 0.4:
            ops.append(KvOp("free", held.pop(rng.randrange(len(held))), 0))
        part = GroupBatch(0, group, (Chunk(held[0], 0, step, False),) if held else (), tuple(ops))
        plan = msgspec.msgpack.decode(msgspec.msgpack.encode(writer.write(part)), type=BatchPlan)
        got = state.part_of(plan)
        assert got.decodes.members == tuple(str(numbers[name]) for name in group.members)
        assert [(c.request, c.tokens) for c in got.prefills] == [(str(numbers[c.request]), step) for c in part.prefills]
        assert state.advance(replay(state.tables, plan), group.kv_sum) == plan.state_checksum
    assert state.state_checksum == writer.state_checksum


def test_a_group_that_was_forgotten_is_sent_in_full() -> None:
    numbers = {f"r{i}": i for i in range(1, 200)}
    writer, state = PlanWriter(1, numbers), StreamState(BlockTables(1))
    old = DecodeGroup(("r1", "r2"), 2, 1, 0, ("r1", "r2"))
    groups = [old, *(DecodeGroup((f"r{i}",), 1, i, 0, (f"r{i}",)) for i in range(3, 4 + REMEMBERED_EPOCHS))]
    groups.append(DecodeGroup(("r2", "r99"), 2, 150, 1, ("r99",), ("r1",)))
    for group in groups:
        plan = writer.write(GroupBatch(0, group))
        assert state.part_of(plan).decodes.members == tuple(str(numbers[name]) for name in group.members)
    assert (plan.base, plan.joined) == (0, (2, 99))


def test_an_id_that_is_used_again_does_not_free_the_blocks_of_its_successor() -> None:
    numbers = {"a": 1}
    writer = PlanWriter(8, numbers)
    writer.write(GroupBatch(0, DecodeGroup(), (), (KvOp("reserve", "a", 2),)))
    numbers["a"] = 2
    plan = writer.write(GroupBatch(0, DecodeGroup(), (), (KvOp("free", "a", 0), KvOp("reserve", "a", 3))))
    assert plan.ops == ((1, 0, 0), (2, 3, 0))


def test_blocks_that_become_a_request_s_own_keep_their_number() -> None:
    """Reassigning blocks, as of spans, changes nothing at the ranks."""
    numbers: dict[str, int] = {}
    writer = PlanWriter(8, numbers)
    (reserved,) = writer.write(GroupBatch(0, DecodeGroup(), (), (KvOp("reserve", "a/spans", 2),))).ops
    assert writer.write(GroupBatch(0, DecodeGroup(), (), (KvOp("reassign", "a", 0, before="a/spans"),))).ops == ()
    number = writer.holder_number("a")
    assert number == reserved[0] < 0
    numbers["a"] = number
    assert writer.holder_number("a/spans") is None
    ops = (KvOp("grow", "a", 1), KvOp("free", "a", 0))
    assert writer.write(GroupBatch(0, DecodeGroup(), (), ops)).ops == ((number, 1, 0), (number, 0, 0))


# -- what goes wrong -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("llama"))


ASKS = [Ask(prompt_of(1, 120), 12), Ask(prompt_of(2, 20), 20, 2), Ask(prompt_of(3, 5), 25, 5)]


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> list[list[int]]:
    with VirtualWorld(folder, ParallelLayout(stages=2)) as world:
        return serve(make_core(world.executor, stages=2, chunking="static:16"), ASKS)


def damaged(plan: BatchPlan, how: str) -> BatchPlan | None:
    if how == "lost":
        return None
    if how == "blocks":
        return msgspec.structs.replace(plan, ops=tuple((op[0], op[1] + 1, op[2]) for op in plan.ops))
    if how == "members":
        return msgspec.structs.replace(plan, left=(*plan.left, *plan.joined), joined=())
    return msgspec.structs.replace(plan, seq=plan.seq - 1)


@pytest.mark.parametrize("how", ["lost", "blocks", "members", "stale"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("seqs", [(3,), (6, 7), (2, 9, 10, 14)])
def test_a_rank_that_cannot_follow_gets_a_snapshot_and_answers_stay_exact(
    folder: Path, undisturbed: list[list[int]], how: str, rank: int, seqs: tuple[int, ...]
) -> None:
    left, hurt = set(seqs), []
    with VirtualWorld(folder, ParallelLayout(stages=2)) as world:

        def tamper(target: int, frames: object) -> object:
            message = msgspec.msgpack.decode(frames[0], type=ToRank)  # type: ignore[index]
            if target == rank and isinstance(message, BatchPlan) and message.seq in left:
                left.discard(message.seq)
                changed = damaged(message, how)
                hurt.append(changed != message)
                return None if changed is None else [msgspec.msgpack.encode(changed)]
            return frames

        world.wire.tamper = tamper  # type: ignore[assignment]
        world.executor.probe_s = 0.05
        got = serve(make_core(world.executor, stages=2, chunking="static:16"), ASKS)
        assert got == undisturbed
        assert (world.executor.resyncs > 0) == any(hurt)


def test_a_diverged_block_table_is_noticed_before_anything_is_computed(
    folder: Path, undisturbed: list[list[int]]
) -> None:
    with VirtualWorld(folder, ParallelLayout(stages=2)) as world:
        world.workers[1].tables.add("intruder", 3)
        assert serve(make_core(world.executor, stages=2, chunking="static:16"), ASKS) == undisturbed
        assert world.executor.resyncs == 1


def test_a_rank_that_never_follows_is_given_up(folder: Path) -> None:
    with VirtualWorld(folder, ParallelLayout(stages=2)) as world:

        def tamper(target: int, frames: object) -> object:
            message = msgspec.msgpack.decode(frames[0], type=ToRank)  # type: ignore[index]
            if target == 1 and isinstance(message, BatchPlan):
                return [
                    msgspec.msgpack.encode(msgspec.structs.replace(message, state_checksum=message.state_checksum ^ 1))
                ]
            return frames

        world.wire.tamper = tamper  # type: ignore[assignment]
        with pytest.raises(
            RankLostError, match="worker 1 does not follow the plan stream: the state's checksum after plan 1"
        ):
            serve(make_core(world.executor, stages=2), ASKS)


def test_prompts_go_only_where_tokens_are_read() -> None:
    layout = ParallelLayout(tp=2, stages=3)
    sent: list[tuple[int, int]] = []

    class Listening(EchoTransport):
        def send(self, rank: int, frames: object) -> None:  # type: ignore[override]
            sent.append((rank, len(frames)))  # type: ignore[arg-type]
            super().send(rank, frames)  # type: ignore[arg-type]

    executor = MultiProcessExecutor(Listening(layout), layout, 8)
    prompt = memoryview(np.arange(10, dtype=np.int32).tobytes())
    executor.admit("a", prompt, SamplingParams())
    assert [rank for rank, frames in sent if frames == 2] == [0, 1]
    sent.clear()
    executor.admit("b", prompt, SamplingParams(repetition_penalty=1.2))
    assert [rank for rank, frames in sent if frames == 2] == [0, 1, 4]
