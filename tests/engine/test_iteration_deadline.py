"""When an engine counts as hung: no heartbeats, or heartbeats of an iteration that takes far longer than predicted."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq
from tests.helpers.polling import until

from headway.runtime.engine.liveness import (
    HeartbeatMonitor,
    IterationDeadline,
    IterationProgress,
    StarvationCheck,
    runnable_cpu_s,
)
from headway.runtime.engine.process import EngineChannel


@pytest.mark.parametrize(
    ("ran_s", "predicted_s", "missed"),
    [(9.9, 0.1, False), (10.1, 0.1, True), (59.0, 3.0, False), (61.0, 3.0, True), (10.1, 0.0, True), (0.0, 0.0, False)],
)
def test_an_iteration_may_take_the_floor_and_a_multiple_of_its_prediction(
    ran_s: float, predicted_s: float, missed: bool
) -> None:
    assert IterationDeadline(10.0, 20.0).missed(IterationProgress(ran_s, predicted_s)) is missed


def test_a_frame_of_another_form_says_nothing() -> None:
    assert IterationProgress.decode(IterationProgress(1.5, 0.25).encode()) == IterationProgress(1.5, 0.25)
    assert IterationProgress.decode(b"") == IterationProgress()


def _hangs(frames: list[bytes], now_s: Callable[[float], float]) -> str | None:
    """Return what a channel says of an engine that has sent these heartbeats."""

    async def ask() -> str | None:
        ports: list[int] = []

        def bind(*sockets: zmq.Socket[Any]) -> None:
            ports.extend(each.bind_to_random_port("tcp://127.0.0.1") for each in sockets)

        context: zmq.Context[Any] = zmq.Context()
        channel = EngineChannel(1.5, bind, IterationDeadline(10.0, 20.0))
        sender = context.socket(zmq.PUSH)
        sender.connect(f"tcp://127.0.0.1:{ports[1]}")
        try:
            channel.ready()
            why = None
            for frame in frames:
                sender.send(frame)
            for turn in range(100):
                await asyncio.sleep(0.005)
                why = channel.hang(now_s(turn / 100))
                if why is not None:
                    break
            return why
        finally:
            sender.close(linger=0)
            channel.close()
            context.term()

    return asyncio.run(ask())


def test_heartbeats_of_an_endless_iteration_are_no_sign_of_life() -> None:
    began = time.monotonic()
    why = _hangs([IterationProgress(12.0, 0.1).encode()], lambda turn: began)
    assert why == "has computed one iteration for 12.0 s, where 0.1 s were predicted: it hangs"
    assert _hangs([IterationProgress(12.0, 1.0).encode()], lambda turn: began) is None


def test_silence_is_looked_at_by_its_own_time_out() -> None:
    began = time.monotonic()
    assert _hangs([], lambda turn: began + 3.0 * turn) == "sent no heartbeat for 1.5 s: it hangs"


@pytest.fixture
def busy() -> Iterator[int]:
    """A process that computes for ever; its id."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    yield process.pid
    process.kill()
    process.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_that_could_run_is_told_from_one_that_sleeps_or_is_stopped(busy: int) -> None:
    assert runnable_cpu_s(busy) is not None
    os.kill(busy, signal.SIGSTOP)
    os.waitid(os.P_PID, busy, os.WSTOPPED | os.WNOWAIT)
    assert runnable_cpu_s(busy) is None
    sleeper = subprocess.Popen(["sleep", "60"])
    until(lambda: runnable_cpu_s(sleeper.pid) is None)
    sleeper.kill()
    sleeper.wait()
    assert runnable_cpu_s(sleeper.pid) is None, "it is gone"


def test_a_process_that_waits_for_a_core_is_excused_until_it_has_computed_or_for_ten_times_its_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used_s: dict[int, float | None] = {1: 5.0}
    monkeypatch.setattr("headway.runtime.engine.liveness.runnable_cpu_s", used_s.get)
    starved = StarvationCheck()
    assert all(starved.excuses(1, 2.0, float(now)) for now in range(20))
    assert not starved.excuses(1, 2.0, 20.0), "ten times the limit"
    assert all(starved.excuses(1, 2.0, float(now)) for now in range(30, 35)), "a suspicion of its own"
    used_s[1] = 7.5
    assert not starved.excuses(1, 2.0, 35.0), "it has computed for more than two seconds, and said nothing"
    used_s[1] = None
    assert not starved.excuses(1, 2.0, 50.0), "it is stopped"
    assert not starved.excuses(None, 2.0, 50.0), "it is elsewhere"


def test_a_silent_process_is_not_lost_while_it_waits_for_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    used_s: dict[int, float | None] = {7: 0.0}
    monkeypatch.setattr("headway.runtime.engine.liveness.runnable_cpu_s", used_s.get)
    pulse = HeartbeatMonitor([0], 1.5, 0.0, lambda member: 7)
    assert all(pulse.silent(now / 2) is None for now in range(20))
    pulse.record_beat(0, 10.0)
    assert all(pulse.silent(10.0 + now / 2) is None for now in range(4))
    used_s[7] = None
    assert pulse.silent(12.0) == 0
