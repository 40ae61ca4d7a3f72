"""What the executor makes of ranks that say nothing, or too little. The wire does as it is told; no processes.

What becomes of requests when ranks are lost and start again: `test_worker_failures`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.parallel.rank_serving import make_core

from headway.core.batch import Batch, Chunk, DecodeGroup, GroupBatch, KvOp
from headway.core.request import SamplingParams
from headway.perf.hardware import ParallelLayout
from headway.runtime.engine.core import EngineCore
from headway.runtime.engine.liveness import HeartbeatMonitor, IterationDeadline
from headway.runtime.engine.protocol import SubmitRequest
from headway.runtime.executor.multi_process import MultiProcessExecutor
from headway.runtime.executor.plans import Frame, FromRank, LoadedRank, PlanDone, RankLostError, ToRank

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)


class ScriptedWire:
    """Remembers what is sent to ranks and says what is put into `says`. `broken`: ranks that cannot be reached."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, ToRank]] = []
        self.says: deque[tuple[int, FromRank]] = deque()
        self.broken: set[int] = set()
        self.killed = self.closed = 0
        self.busy = False
        self.starts: Callable[[], bool] = lambda: True
        self.waits_on: tuple[Any, ...] = ("socket",)

    def start(self, timeout_s: float | None) -> list[LoadedRank] | None:
        return [] if self.starts() else None

    def starved(self, rank: int, limit_s: float, now: float) -> bool:
        return self.busy

    def send(self, rank: int, frames: Sequence[Frame]) -> None:
        if rank in self.broken:
            raise RankLostError(rank, "cannot be reached")
        self.sent.append((rank, _decoder.decode(frames[0])))

    def receive(self, timeout_s: float | None) -> tuple[int, list[bytes]] | None:
        if not self.says:
            time.sleep(min(0.001, timeout_s or 0.001))
            return None
        rank, said = self.says.popleft()
        return rank, [_encoder.encode(said)]

    def kill(self) -> None:
        self.killed += 1

    def close(self) -> None:
        self.closed += 1

    def kinds(self, kind: type) -> list[tuple[int, Any]]:
        return [(rank, message) for rank, message in self.sent if isinstance(message, kind)]


def begin(
    rewire: Callable[[], ScriptedWire] | None = None, limit_s: float = 10.0
) -> tuple[ScriptedWire, MultiProcessExecutor, EngineCore]:
    """Two stages, one prompt, its first batch on its way."""
    wire = ScriptedWire()
    executor = MultiProcessExecutor(wire, ParallelLayout(stages=2), rewire, IterationDeadline(limit_s, 20.0))
    core = make_core(executor, stages=2)
    ask(core, "a")
    # However slow this machine is, nobody is late yet.
    wire.busy = True
    core.step(0.0)
    wire.busy = False
    return wire, executor, core


def ask(core: EngineCore, name: str) -> None:
    params = SamplingParams(max_tokens=8, repetition_penalty=1.1)
    submit = SubmitRequest(id=name, prompt_tokens=5, params=params, received_s=0.0)
    assert core.submit(submit, memoryview(np.arange(3, 8, dtype=np.int32).tobytes())) is None


def test_a_failed_send_is_raised_with_the_next_result_and_nowhere_else() -> None:
    wire, executor, core = begin()
    wire.broken = {1}
    ask(core, "b")
    executor.forget("never heard of")
    assert not executor.accepts
    for _ in range(2):
        with pytest.raises(RankLostError, match="worker 1 cannot be reached"):
            executor.result(0.0)


def test_a_rank_whose_report_was_lost_is_lost() -> None:
    wire, executor, core = begin()
    wire.says.append((0, PlanDone(1)))
    assert executor.result(0.001) is None
    ask(core, "b")
    core.step(0.0)
    wire.says.append((1, PlanDone(2)))
    with pytest.raises(RankLostError, match="worker 1 has carried out plan 2, and its report of 1 was due"):
        executor.result(1.0)


def test_ranks_that_run_without_progress_are_lost_unless_they_wait_for_a_core() -> None:
    wire, executor, _ = begin(limit_s=0.05)
    wire.busy = True
    assert executor.result(0.3) is None
    wire.busy = False
    with pytest.raises(RankLostError, match=r"worker 0 has carried out nothing for 0\.\d+ s"):
        executor.result(5.0)


def test_a_group_that_waits_for_another_in_a_batch_is_not_late() -> None:
    wire = ScriptedWire()
    executor = MultiProcessExecutor(wire, ParallelLayout(kvp=2), None, IterationDeadline(0.05, 0.0))
    chunk = Chunk("a", 0, 4, False)
    for name in "ab":
        executor.admit(name, memoryview(np.arange(3, 8, dtype=np.int32).tobytes()), SamplingParams(max_tokens=8))
    ops = {name: (KvOp("reserve", name, 1),) for name in "ab"}
    parts = (
        GroupBatch(0, DecodeGroup(), (chunk,), ops["a"]),
        GroupBatch(1, DecodeGroup(), (Chunk("b", 0, 4, False),), ops["b"]),
    )
    executor.submit(Batch(id=1, parts=parts))
    wire.says.append((0, PlanDone(1)))
    with pytest.raises(RankLostError, match=r"worker 1 has carried out nothing"):
        executor.result(5.0)


def test_closing_while_new_ranks_start_leaves_none_behind() -> None:
    fresh = ScriptedWire()
    fresh.starts = lambda: False
    wire, executor, core = begin(lambda: fresh)
    wire.broken = {0}
    ask(core, "b")
    core.step(0.0)
    core.step(0.0)
    assert core.recovering
    executor.close()
    assert (wire.killed, fresh.closed) == (1, 1)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    moves=st.lists(st.tuples(st.sampled_from(["beat 0", "beat 1", "look"]), st.floats(0.01, 0.9)), max_size=60),
    timeout_s=st.floats(1.0, 5.0),
)
def test_a_process_is_silent_exactly_when_heartbeats_miss_the_timeout(
    moves: list[tuple[str, float]], timeout_s: float
) -> None:
    pulse, now, looked = HeartbeatMonitor((0, 1), timeout_s, 0.0), 0.0, 0.0
    last = {0: 0.0, 1: 0.0}
    for move, passed in moves:
        now += passed
        if move != "look":
            who = int(move[-1])
            pulse.record_beat(who, now)
            last[who] = now
        if now - looked <= 1.0:
            found = pulse.silent(now)
            silent = [who for who in (0, 1) if now - last[who] > timeout_s]
            assert found in silent if silent else found is None
        else:  # away for too long: nobody is blamed for that
            before = looked
            assert pulse.silent(now) in (None, *(w for w in (0, 1) if before - last[w] > timeout_s - 1.0))
            last = {who: min(now, at + now - before) for who, at in last.items()}
        looked = now


def test_time_without_a_check_is_no_silence() -> None:
    pulse = HeartbeatMonitor((0,), 2.0, 0.0)
    assert pulse.silent(0.5) is None
    assert pulse.silent(1000.0) is None
    assert pulse.silent(1000.9) is None
    assert pulse.silent(1001.8) == 0
