"""A timed executor says at the predicted time what a real one would, and its delays do not add up."""

from __future__ import annotations

from collections.abc import Callable

from tests.helpers.timed.executor import TimedExecutor

from headway.core.batch import Batch, Chunk, DecodeGroup, GroupBatch


class Clock:
    def __init__(self) -> None:
        self.now_s = 10.0

    def now(self) -> float:
        return self.now_s


class Alarms:
    def __init__(self) -> None:
        self.due: list[tuple[float, Callable[[], None]]] = []

    def at(self, due_s: float, call: Callable[[], None]) -> None:
        self.due.append((due_s, call))


def batch(number: int, seconds: float) -> Batch:
    chunks = (Chunk("p", 0, 5, last=False), Chunk("q", 0, 5, last=True))
    return Batch(id=number, parts=(GroupBatch(0, DecodeGroup(("a", "b"), 9), chunks),), predicted_s=seconds)


def test_a_batch_is_there_when_it_is_due_and_one_is_under_way_at_a_time() -> None:
    clock, alarms = Clock(), Alarms()
    executor = TimedExecutor(clock, alarms)  # type: ignore[arg-type]
    assert executor.accepts
    executor.submit(batch(1, 0.5))
    assert not executor.accepts
    assert alarms.due[0][0] == 10.5
    clock.now_s = 10.4
    assert executor.result(0.0) is None
    clock.now_s = 10.52  # it comes round to it late
    result = executor.result(0.0)
    assert result is not None
    assert [emitted.request for emitted in result.emitted] == ["a", "b", "q"]
    assert (result.elapsed_s, result.stages) == (0.5, (((10.0, 10.5),),))
    clock.now_s = 10.521
    executor.submit(batch(2, 0.5))
    assert alarms.due[1][0] == 11.0, "from the end of the one before"
    clock.now_s = 11.0
    assert executor.result(0.0) is not None
    clock.now_s = 12.0
    executor.submit(batch(3, 0.5))
    assert alarms.due[2][0] == 12.5, "after a break, from now"
