"""The event loop of all simulations: a virtual clock, the arrivals, and a heap of scheduled events.

Events are taken in order of (time, kind, order of scheduling). At one instant scheduled events come first, by kind,
then arrivals; only then are batches, spans and transfers started. This order is part of the result: it makes a run
reproducible bit by bit.
"""

from __future__ import annotations

import heapq
import random
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from enum import IntEnum
from typing import Any

from headway.core.request import Request, Slo
from headway.sim.metrics import NO_TARGETS
from headway.sim.spec import RunSpec
from headway.sim.workload import TraceRequest

NEVER = float("inf")

OnProgress = Callable[[float, int], None]
"""Progress callback, called every 1,024 instants with (virtual seconds, requests ended)."""


class EventKind(IntEnum):
    """Kind of an event; of events at one instant the lower kind is taken first."""

    SPAN_END = 0
    """A span of a cluster ends or pauses."""
    BATCH_END = 1
    """A batch leaves the last stage, or stage 0 becomes free."""
    KV_SENT = 2
    """A slice of KV has reached its target."""
    PREFIX_COPIED = 3
    """A cached prefix has reached the instance that asked for it."""
    TIMER = 4
    """A placement policy asked to be called."""
    CLIENT_LEAVES = 5
    """A client times out or loses patience."""
    NEXT_TURN = 6
    """A session's next request arrives."""


class EventLoop(ABC):
    """One run of a workload in virtual time. This class orders the events; subclasses carry them out."""

    def __init__(self, workload: Iterable[TraceRequest], run: RunSpec) -> None:
        self.run_spec = run
        self.now = 0.0
        """Virtual clock, seconds."""
        self.end_s = run.window_s if run.window_s is not None else NEVER
        """Virtual seconds after which no event is taken; `NEVER` without a window."""
        ordered = sorted(workload, key=lambda request: request.arrival_s)
        self.arrivals = [request for request in ordered if request.arrival_s < self.end_s and not request.waits]
        # requests that follow an answer, by session and thread
        self._turns: dict[tuple[str | None, str], deque[TraceRequest]] = {}
        for request in ordered:
            if request.waits:
                self._turns.setdefault((request.session, request.thread), deque()).append(request)
        self.closed_loop = bool(self._turns)
        """Whether there are requests that follow an answer."""
        self._due_turns: list[float] = []  # times of the NEXT_TURN events in the heap, as a heap of its own
        # index into `arrivals` of the next one
        self._arrived = 0
        self._heap: list[tuple[float, EventKind, int, Any]] = []
        self._scheduled = 0
        self._departures: list[float] = []  # times of the CLIENT_LEAVES events in the heap, as a heap of its own
        self._patience = random.Random(f"patience {run.seed}")

    def schedule(self, at_s: float, kind: EventKind, what: Any) -> None:
        """Schedule a call of `on_event(kind, what)` at `at_s`, in virtual seconds."""
        self._scheduled += 1
        # the running number breaks ties, so that payloads are never compared
        heapq.heappush(self._heap, (at_s, kind, self._scheduled, what))

    @property
    def quiet_until_s(self) -> float:
        """Virtual seconds up to which no request arrives or leaves and the window does not end.

        Engines repeat decode steps without consulting the scheduler until then.
        """
        arrival_s = self.arrivals[self._arrived].arrival_s if self._arrived < len(self.arrivals) else NEVER
        if self._due_turns:
            arrival_s = min(arrival_s, self._due_turns[0])
        return min(arrival_s, self._departures[0] if self._departures else NEVER, self.end_s)

    @property
    def idle(self) -> bool:
        """Whether no event is to come."""
        return not self._heap and self._arrived == len(self.arrivals)

    def run_events(self, on_progress: OnProgress | None = None) -> None:
        """Process all events, up to the last one or the end of the window."""
        heap, arrivals, count, instants = self._heap, self.arrivals, len(self.arrivals), 0
        pop, leaves = heapq.heappop, EventKind.CLIENT_LEAVES
        arrival_s = arrivals[0].arrival_s if count else NEVER
        while True:
            now = min(heap[0][0], arrival_s) if heap else arrival_s
            if now == NEVER or now > self.end_s:
                break
            self.now = now
            # an event may schedule another at this instant: the heap is read again each time
            while heap and heap[0][0] == now:
                _, kind, _, what = pop(heap)
                if kind < leaves:
                    self.on_event(kind, what)
                elif kind == leaves:
                    # departures leave both heaps in the same order of time, so this is the entry of this event
                    pop(self._departures)
                    self.on_event(kind, what)
                else:
                    pop(self._due_turns)
                    self.on_arrival(what)
            while arrival_s == now:
                source = arrivals[self._arrived]
                self._arrived += 1
                # `_arrived` is advanced first: `quiet_until_s` must be the arrival after this one
                self.on_arrival(source)
                arrival_s = arrivals[self._arrived].arrival_s if self._arrived < count else NEVER
            self.on_instant_end()
            instants += 1
            # every 1,024 instants
            if on_progress is not None and not instants & 0x3FF:
                on_progress(now, self.ended)

    @abstractmethod
    def on_event(self, kind: EventKind, what: Any) -> None:
        """Carry out a scheduled event; `what` is the payload given to `schedule`."""

    @abstractmethod
    def on_arrival(self, source: TraceRequest) -> None:
        """Admit or reject an arriving request."""

    @abstractmethod
    def on_instant_end(self) -> None:
        """Start batches, spans and transfers, after all events of an instant."""

    @property
    @abstractmethod
    def ended(self) -> int:
        """Number of requests that have ended, rejected ones included."""

    # -- shared by subclasses -------------------------------------------------------------------------------------

    def request_of(self, source: TraceRequest, number: int) -> Request:
        """Return the scheduler's request for the `number`-th arrival."""
        run = self.run_spec
        targets = run.targets.get(source.klass, NO_TARGETS)
        return Request(
            id=f"r{number}",
            arrival_s=source.arrival_s,
            prompt_tokens=max(1, source.prompt_tokens),
            max_output_tokens=max(1, source.output_tokens, run.max_output or 0),
            # the last prompt token is always computed: it yields the first output token
            cached_tokens=max(0, min(source.cached_tokens, source.prompt_tokens - 1)),
            slo=Slo(targets.ttft_s, targets.tbt_s, run.refuse_late) if run.send_slo else Slo(),
            priority=source.priority,
        )

    def schedule_departure(self, departing: Any) -> None:
        """Schedule a CLIENT_LEAVES event for a request that has just arrived, if its client ever leaves.

        Its payload is (`departing`, reason); the reason is "timeout" or "aborted".
        """
        run = self.run_spec
        waits = [] if run.timeout_s is None else [(run.timeout_s, "timeout")]
        if run.patience_s is not None:
            waits.append((self._patience.expovariate(1.0 / run.patience_s), "aborted"))
        if waits:
            # whichever comes first: a client leaves once
            wait_s, why = min(waits)
            heapq.heappush(self._departures, self.now + wait_s)
            self.schedule(self.now + wait_s, EventKind.CLIENT_LEAVES, (departing, why))

    def schedule_next_turn(self, ended: TraceRequest) -> None:
        """Schedule the request that follows the answer to one that ends now, well or badly, if there is any."""
        waiting = self._turns.get((ended.session, ended.thread))
        if not waiting:
            return
        turn = waiting.popleft()
        at_s = self.now + (turn.think_s or 0.0)
        if at_s < self.end_s:
            heapq.heappush(self._due_turns, at_s)
            self.schedule(at_s, EventKind.NEXT_TURN, replace(turn, arrival_s=at_s))

    def observed_s(self, last_s: float) -> tuple[float, float]:
        """Return (end, duration) of the observed time: the window, or from the first arrival to `last_s`."""
        if self.run_spec.window_s is not None:
            return self.run_spec.window_s, self.run_spec.window_s
        return last_s, last_s - (self.arrivals[0].arrival_s if self.arrivals else 0.0)
