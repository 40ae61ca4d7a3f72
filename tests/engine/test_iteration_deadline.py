"""When an engine counts as hung: no heartbeats, or heartbeats of an iteration that takes far longer than predicted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
import zmq

from headway.runtime.engine.liveness import IterationDeadline, IterationProgress
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
            channel.started()
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
