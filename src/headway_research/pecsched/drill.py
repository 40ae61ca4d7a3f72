"""A driver of PecSched's placement policy alone, at any cluster size, to time and check its decisions (Fig. 15).

Every replica is one server that computes short prefills in order; decodes take a fixed time. That is far less than the
cluster simulator does, which runs every instance's own scheduler, so that 8,192 replicas take seconds. Invariants are
checked at every step (InvariantError).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from headway.core.errors import InvariantError
from headway.core.request import Request
from headway.perf.latency.groups import GroupLatency, GroupShape
from headway.policy.placement.contract import (
    Action,
    ActionRefused,
    ClusterSnapshot,
    ClusterState,
    CommitSpans,
    EnqueueRequest,
    Event,
    KvReady,
    PlacementPolicy,
    PreemptRequest,
    RequestArrived,
    RequestFinished,
    RequestPrefilled,
    ResumeRequest,
    SpanDone,
    SpanPaused,
    SpanProgress,
    TransferKv,
    WakeupDue,
)

# kinds of events; at one instant the lower kind comes first, so ends precede arrivals
_DONE, _SHORT, _NEWS, _TIMER, _ARRIVE = range(5)


@dataclass
class LongRequest:
    """The state of a long request."""

    request: Request
    group: tuple[int, ...]
    seconds: float
    """Seconds of its whole prefill on the group."""
    left_s: float
    """Seconds still to compute, as of the last start or pause."""
    began_s: float = -1.0
    """Start of the current stretch; -1 while it does not run."""
    wants: bool = True
    """It is to start or resume as soon as its group is free."""
    serial: int = 0
    """Counts starts and preemptions: scheduled ends with another number are stale."""


@dataclass
class DrillResult:
    """The result of a drill. Decision times are by the stopwatch, all others virtual."""

    short_s: list[float] = field(default_factory=list)
    """Seconds of each call that placed a short request."""
    long_s: list[float] = field(default_factory=list)
    """Seconds of each call that placed long requests, divided by their number."""
    all_s: float = 0.0
    """Seconds of all calls of the policy."""
    actions: list[tuple[float, Action]] = field(default_factory=list)
    """(time, action), where they are kept."""
    prefilled_s: dict[str, float] = field(default_factory=dict)
    """Time of each request's first token."""
    suspensions: int = 0
    """Pauses of long prefills."""


class PlacementDrill:
    """One run of a policy over requests. Long prefills can be paused at the edges of `layers` equal layers."""

    def __init__(
        self,
        policy: PlacementPolicy,
        book: ClusterState,
        latency: GroupLatency,
        layers: int = 32,
        decode_s: float = 2.0,
        stopwatch: Callable[[], float] | None = None,
        keep_actions: bool = False,
    ) -> None:
        self._policy, self._book, self._latency = policy, book, latency
        self._layers, self._decode_s = layers, decode_s
        self._watch, self._keep = stopwatch, keep_actions
        count = len(book.instances)
        # by instance: queued short prefills, whether one computes, and the long prefill that computes
        self._queue: list[deque[Request]] = [deque() for _ in range(count)]
        self._busy = [False] * count
        self._computing: list[LongRequest | None] = [None] * count
        # long requests that hold their group, and those of them that are to start or resume
        self._longs: dict[str, LongRequest] = {}
        self._wanting: dict[str, LongRequest] = {}
        self._requests: dict[str, Request] = {}
        self._heap: list[tuple[float, int, int, Any]] = []
        self._serial = 0
        self._timer_s = float("inf")
        self.now = 0.0
        self.out = DrillResult()

    def run(self, requests: Sequence[Request], until_s: float = float("inf")) -> DrillResult:
        """Run all requests to their end, or to `until_s`."""
        for request in requests:
            self._push(request.arrival_s, _ARRIVE, request)
        while self._heap and self._heap[0][0] <= until_s:
            self.now, kind, _, what = heapq.heappop(self._heap)
            self._happen(kind, what)
            self._start_longs()
            wake_s = self._policy.next_wakeup(self.now)
            if wake_s is not None and wake_s != self._timer_s:
                self._timer_s = max(wake_s, self.now)
                self._push(self._timer_s, _TIMER, self._timer_s)
        return self.out

    def _push(self, at_s: float, kind: int, what: Any) -> None:
        self._serial += 1
        heapq.heappush(self._heap, (at_s, kind, self._serial, what))

    def _happen(self, kind: int, what: Any) -> None:
        if kind == _ARRIVE:
            self._requests[what.id] = what
            self._tell(RequestArrived(what))
        elif kind == _SHORT:
            at, request = what
            self._busy[at] = False
            self._queue[at].popleft()
            self._token(request)
            done = request.max_output_tokens <= 1
            self._tell(RequestFinished(request.id) if done else RequestPrefilled(request.id, (at,)))
            self._serve(at)
        elif kind == _DONE:
            word, long, serial = what
            if serial == long.serial:
                self._pause(long) if word == "pause" else self._complete(long)
        elif kind == _NEWS:
            if isinstance(what, RequestFinished):
                self._longs.pop(what.request, None)
            self._tell(what)
        elif what == self._timer_s:
            self._timer_s = float("inf")
            self._tell(WakeupDue())

    def _tell(self, event: Event) -> None:
        view = ClusterSnapshot(self._book, self.now)
        if self._watch is None:
            actions = self._policy.on_event(event, view)
        else:
            began = self._watch()
            actions = self._policy.on_event(event, view)
            took = self._watch() - began
            self.out.all_s += took
            commits = sum(isinstance(action, CommitSpans) for action in actions)
            # a call that commits spans placed long requests, even when the event was an arrival
            if commits:
                self.out.long_s.append(took / commits)
            elif isinstance(event, RequestArrived):
                self.out.short_s.append(took)
        for action in actions:
            if self._keep:
                self.out.actions.append((self.now, action))
            self._do(action)

    def _do(self, action: Action) -> None:
        if isinstance(action, EnqueueRequest):
            self._enqueue(action)
        elif isinstance(action, CommitSpans):
            span = action.spans[0]
            nodes = len({self._book.instances[i].node for i in span.group})
            seconds = self._latency.prefill_s(0, span.end, GroupShape(len(span.group), nodes, span.strategy))
            for i in span.group:
                if any(i in other.group for other in self._longs.values()):
                    raise InvariantError(f"instance {i} is given to two long requests")
            long = self._longs[action.request] = LongRequest(span.request, span.group, seconds, seconds)
            self._wanting[action.request] = long
        elif isinstance(action, PreemptRequest):
            self._preempt(self._longs[action.request])
        elif isinstance(action, ResumeRequest):
            long = self._longs[action.request]
            if long.began_s >= 0 or long.wants:
                raise InvariantError(f"{action.request} is not paused")
            long.wants = True
            self._wanting[action.request] = long
        elif isinstance(action, TransferKv):
            # a transfer takes a fixed millisecond
            self._push(self.now + 0.001, _NEWS, KvReady(action.request, action.to))

    # -- short requests -----------------------------------------------------------------------------------------------

    def _enqueue(self, action: EnqueueRequest) -> None:
        request = self._requests[action.request]
        if action.phase == "decode":
            self._push(self.now + self._decode_s, _NEWS, RequestFinished(action.request))
            return
        if action.phase == "all":
            raise InvariantError("the drill knows disaggregated decodes only")
        at = action.group[0]
        self._queue[at].append(request)
        self._serve(at)

    def _serve(self, at: int) -> None:
        queue = self._queue[at]
        if queue and not self._busy[at] and self._computing[at] is None:
            self._busy[at] = True
            request = queue[0]
            seconds = self._latency.prefill_s(0, request.prompt_tokens, GroupShape(1))
            self._push(self.now + seconds, _SHORT, (at, request))

    def _token(self, request: Request) -> None:
        if request.id in self.out.prefilled_s:
            raise InvariantError(f"{request.id} has two first tokens")
        self.out.prefilled_s[request.id] = self.now

    # -- long requests ------------------------------------------------------------------------------------------------

    def _start_longs(self) -> None:
        """Start or resume long prefills whose group has no short prefill queued or computing and no other long one."""
        for name, long in list(self._wanting.items()):
            if all(not self._queue[i] and self._computing[i] is None for i in long.group):
                del self._wanting[name]
                long.wants, long.began_s, long.serial = False, self.now, long.serial + 1
                for i in long.group:
                    self._computing[i] = long
                self._push(self.now + long.left_s, _DONE, ("done", long, long.serial))

    def _preempt(self, long: LongRequest) -> None:
        name = long.request.id
        layer_s = long.seconds / self._layers
        # preempted before it started, or twice
        if long.began_s < 0:
            self._push(self.now, _NEWS, ActionRefused(name, "preempt", "it does not run"))
            return
        ran_s = self.now - long.began_s
        # the layer in progress is completed; on an edge exactly (up to rounding) the prefill stops there
        whole = int((long.seconds - long.left_s + ran_s) / layer_s - 1e-9) + 1
        at_s = long.began_s + whole * layer_s - (long.seconds - long.left_s)
        # no edge is left before the end
        if whole >= self._layers:
            self._push(self.now, _NEWS, ActionRefused(name, "preempt", "it is in its last layer"))
            return
        long.serial += 1
        self._push(at_s, _DONE, ("pause", long, long.serial))

    def _pause(self, long: LongRequest) -> None:
        self._let_go(long)
        self.out.suspensions += 1
        done = round((1 - long.left_s / long.seconds) * self._layers)
        self._tell(SpanPaused(long.request.id, 0, SpanProgress(0, done)))
        for i in long.group:
            self._serve(i)

    def _complete(self, long: LongRequest) -> None:
        self._let_go(long)
        # pauses and resumptions must add up to the whole prefill
        if abs(long.left_s) > 1e-6:
            raise InvariantError(f"{long.request.id} ended with {long.left_s} s of its prefill left")
        self._token(long.request)
        self._tell(SpanDone(long.request.id, 0, True))
        if long.request.max_output_tokens <= 1:
            del self._longs[long.request.id]
            self._tell(RequestFinished(long.request.id))
        for i in long.group:
            self._serve(i)

    def _let_go(self, long: LongRequest) -> None:
        long.left_s -= self.now - long.began_s
        long.began_s = -1.0
        for i in long.group:
            self._computing[i] = None
