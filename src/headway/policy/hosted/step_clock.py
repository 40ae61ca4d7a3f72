"""Durations of steps, of which several may be in flight."""

from __future__ import annotations

from collections import OrderedDict

from headway.perf.latency.base import BatchLoad

_MOST = 64
"""Steps whose results never came (an executor that was reset) are forgotten beyond so many."""


class StepClock:
    """Pairs the load of a step with the time until its results came back.

    Under asynchronous scheduling step n+1 is made while step n runs: its time counts from where step n came back, so
    that what overlaps is not counted twice.
    """

    def __init__(self) -> None:
        self._steps: OrderedDict[int, tuple[float, BatchLoad, float]] = OrderedDict()
        self._returned_s = 0.0

    def made(self, key: int, now: float, load: BatchLoad, predicted_s: float) -> None:
        """Note a step that goes to the executor. `key` identifies it until it returns."""
        self._steps[key] = (now, load, predicted_s)
        if len(self._steps) > _MOST:
            self._steps.popitem(last=False)

    def returned(self, key: int, now: float) -> tuple[BatchLoad, float, float] | None:
        """(load, seconds measured, seconds predicted) of a step whose results are there; None where it is unknown."""
        step = self._steps.pop(key, None)
        began_s, self._returned_s = self._returned_s, now
        if step is None:
            return None
        made_s, load, predicted_s = step
        return load, now - max(made_s, began_s), predicted_s
