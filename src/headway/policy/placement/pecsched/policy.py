"""PecSched (§5): short prefills preempt long ones, short decodes live elsewhere, long decodes share their replicas.

A short request goes, in this order, to a replica on which nothing is; beside a long decode; to a replica of a paused
long prefill; or a running one is paused for it: all replicas of a ring at once, at the next layer edge (the paper
pauses between any two kernels). Half a layer is what that takes on average, a second or more for half a million tokens:
in `default` mode a short request rather joins a queue that will be over before. Else it joins the shortest queue of a
replica without a long request, in `default` mode up to `batch_tokens`, and waits in the global queue where it may not.
Which replica: the shortest queue, so that batches are as long on every replica of a ring; how much at a time:
`batch_tokens`.

A long request waits in its own queue, in order, until enough replicas have no other long one on them; it takes them all
at once, its prefill begins when the short requests there have ended (their prefills, where decodes are apart), and goes
on after a pause when the last of those that it made room for has. Ageing, which the paper lacks, bounds how long it is
suspended: without it a steady stream of short requests keeps it away for ever.

What the paper leaves open and is decided here: the youngest long prefill is preempted first; a replica holds one long
request at most; the decode replica with the fewest tokens takes the next short.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from headway.core.errors import ConfigError
from headway.core.request import Request
from headway.core.span import Span
from headway.perf.latency.groups import GroupShape
from headway.policy.placement.base import (
    Action,
    ActionRefused,
    CommitSpans,
    EnqueueRequest,
    Event,
    KvReady,
    PreemptRequest,
    RejectRequest,
    RequestArrived,
    RequestDropped,
    RequestFinished,
    RequestPrefilled,
    ResumeRequest,
    SpanDone,
    SpanPaused,
    TransferKv,
    WakeupDue,
)
from headway.policy.placement.pecsched.argmin import HeapArgMin
from headway.policy.placement.pecsched.group_sizing import GroupSizing, StrategyChooser
from headway.policy.placement.pecsched.long_groups import (
    AgeingPolicy,
    AgeingQueue,
    PreemptionCandidates,
    SequenceParallelGroup,
)
from headway.policy.placement.pecsched.options import PecSchedOptions
from headway.policy.placement.pecsched.replica_index import ReplicaIndex
from headway.policy.placement.registry import PolicyContext
from headway.policy.placement.view import ClusterSnapshot

__all__ = ["PecSched", "PecSchedOptions"]

_INSTANT_S = 1e-6
_UNITS_A_SECOND = 1e6
"""Queues that count seconds are whole microseconds."""


class ShortRequest:
    """A short request on its way: what it weighs, and where it is (-1: in the global queue)."""

    __slots__ = ("replica", "request", "weight")

    def __init__(self, request: Request, weight: int) -> None:
        self.request, self.weight, self.replica = request, weight, -1


class PecSched:
    """See the module. `suspensions`: how often long requests were asked to pause."""

    def __init__(self, surroundings: PolicyContext, options: PecSchedOptions, *, literal: bool = False) -> None:
        """literal: decide by looking at every replica (see Board)."""
        self._around, self._options, self._literal = surroundings, options, literal
        self._bounded = options.mode != "paper"
        self._weighs = self._bounded and options.counts_seconds
        self._board: ReplicaIndex | None = None
        self._shorts: dict[str, ShortRequest] = {}
        self._waiting: dict[str, None] = {}
        self._longs: deque[Request] = deque()
        self._rings: dict[str, SequenceParallelGroup] = {}
        patience = AgeingPolicy(options.patience, options.slice_s)
        self._victims, self._deadlines = PreemptionCandidates(patience), AgeingQueue(patience)
        self._decoding: dict[str, tuple[int, int]] = {}
        self._at_home: dict[str, ShortRequest] = {}
        self._weights: dict[int, int] = {}
        self._order = 0
        self.suspensions = 0
        self._handlers: dict[type, Callable[[Any, float, ClusterSnapshot], list[Action]]] = {
            RequestArrived: self._arrived,
            RequestPrefilled: self._prefilled,
            KvReady: self._kv_ready,
            SpanDone: self._span_done,
            SpanPaused: self._paused,
            RequestFinished: self._finished,
            RequestDropped: self._finished,
            ActionRefused: self._refused,
            WakeupDue: self._woken,
        }

    def on_event(self, event: Event, view: ClusterSnapshot) -> Sequence[Action]:
        """See Placement."""
        if self._board is None:
            self._begin(view)
        handler = self._handlers.get(type(event))
        return handler(event, view.now_s, view) if handler is not None else []

    def next_wakeup(self, now: float) -> float | None:
        """See Placement."""
        due_s = self._deadlines.next_s()
        if not self._waiting or not self._options.preempt:
            return due_s
        retry_s = self._victims.next_s()
        if retry_s is None:
            return due_s
        return retry_s + _INSTANT_S if due_s is None else min(due_s, retry_s + _INSTANT_S)

    def _begin(self, view: ClusterSnapshot) -> None:
        options = self._options
        self._ids = view.with_role("mixed", "prefill")
        decodes = view.with_role("decode")
        if not self._ids:
            raise ConfigError("pecsched needs at least one instance of role mixed or prefill")
        if options.disaggregate and not decodes:
            raise ConfigError("pecsched keeps short decodes apart: give some instances the role decode, or say "
                              "`disaggregate: false`")  # fmt: skip
        nodes = [view.instances[i].node for i in self._ids]
        self._board = ReplicaIndex(nodes, literal=self._literal)
        self._decoders = decodes
        self._decode_load = [0] * len(decodes)
        self._decode_least = HeapArgMin(len(decodes))
        for i in range(len(decodes)):
            self._decode_least.put(i, 0)
        first = view.instances[self._ids[0]]
        self._per_node = max(map(nodes.count, set(nodes)))
        self._forms = StrategyChooser(self._around, first.tp, options.fast_sp)
        capacity = min(view.instances[i].capacity for i in self._ids)
        self._sizes = GroupSizing(options.long_replicas, self._forms, capacity, len(self._ids), self._per_node,
                            options.long_target_s, options.long_sp)  # fmt: skip

    # -- what happens to requests -----------------------------------------------------------------------------------

    def _arrived(self, event: RequestArrived, now: float, view: ClusterSnapshot) -> list[Action]:
        request = event.request
        if request.prompt_tokens > self._options.long_tokens:
            self._longs.append(request)
            return self._take_replicas(view)
        name = request.id
        self._shorts[name] = ShortRequest(request, self._weight(request.prompt_tokens - request.cached_tokens))
        actions: list[Action] = []
        if self._waiting or not self._dispatch(name, now, actions):
            self._waiting[name] = None
            self._dispatch_all(now, actions)
        return actions

    def _prefilled(self, event: RequestPrefilled, now: float, view: ClusterSnapshot) -> list[Action]:
        short = self._shorts.get(event.request)
        if short is None:
            return []
        del self._shorts[event.request]
        actions: list[Action] = []
        if not self._options.disaggregate:
            self._at_home[event.request] = short
            self._the_board().decode(short.replica, 1)
            actions.append(EnqueueRequest(event.request, event.group, "decode", beside=True))
        elif short.request.max_output_tokens > 1:
            at = self._decode_least.least()
            tokens = short.request.prompt_tokens + short.request.max_output_tokens
            self._decode(at, tokens)
            self._decoding[event.request] = (at, tokens)
            actions.append(TransferKv(event.request, self._decoders[at], overlapped=True))
        return self._vacate(short, now, actions)

    def _kv_ready(self, event: KvReady, now: float, view: ClusterSnapshot) -> list[Action]:
        return [EnqueueRequest(event.request, (event.instance,), "decode")]

    def _span_done(self, event: SpanDone, now: float, view: ClusterSnapshot) -> list[Action]:
        ring = self._rings.get(event.request)
        if ring is None or not event.last:
            return []
        ring.decoding, ring.state, ring.began_s = True, "decode", now
        actions: list[Action] = []
        if ring.request.max_output_tokens > 1:
            actions.append(EnqueueRequest(event.request, self._group_of(ring), "decode", beside=True))
        board = self._the_board()
        if self._options.colocate:
            board.open(ring, board.beside)
        else:
            board.open(ring, None)
            self._victims.add(ring)
        return self._dispatch_all(now, actions)

    def _paused(self, event: SpanPaused, now: float, view: ClusterSnapshot) -> list[Action]:
        ring = self._rings.get(event.request)
        if ring is None:
            return []
        ring.state = "paused"
        ring.since_s = now
        ring.computed_s += now - ring.began_s
        self._deadlines.add(ring)
        return [] if ring.busy else self._go_on(ring, now)

    def _finished(self, event: RequestFinished | RequestDropped, now: float, view: ClusterSnapshot) -> list[Action]:
        name = event.request
        short = self._shorts.pop(name, None)
        if short is not None:
            self._waiting.pop(name, None)
            return self._vacate(short, now, [])
        short = self._at_home.pop(name, None)
        if short is not None:
            self._the_board().decode(short.replica, -1)
            return self._make_way(short.replica, now, [])
        where = self._decoding.pop(name, None)
        if where is not None:
            self._decode(where[0], -where[1])
            return []
        ring = self._rings.pop(name, None)
        if ring is None:
            self._longs = deque(request for request in self._longs if request.id != name)
            return []
        ring.state = "ended"
        self._the_board().give_back(ring)
        return self._dispatch_all(now, self._take_replicas(view))

    def _refused(self, event: ActionRefused, now: float, view: ClusterSnapshot) -> list[Action]:
        if event.request in self._decoding:
            return [RejectRequest(event.request, f"it cannot be decoded: {event.why}")]
        ring = self._rings.get(event.request)
        if ring is None:
            return []
        if event.verb == "preempt" and ring.state == "pausing":  # its last layer: what was sent there waits for its end
            ring.state = "decode" if ring.decoding else "prefill"
            self._the_board().open(ring, None)
        elif event.verb == "commit":
            del self._rings[event.request]
            ring.state = "ended"
            self._the_board().give_back(ring)
            self._longs.appendleft(ring.request)
            return self._take_replicas(view)
        return []

    def _woken(self, event: WakeupDue, now: float, view: ClusterSnapshot) -> list[Action]:
        actions: list[Action] = []
        self._dispatch_all(now, actions)
        for ring in self._deadlines.due(now):
            ring.state = "closing"
            self._the_board().open(ring, None)
            if not ring.busy:
                actions += self._go_on(ring, now)
        return actions

    # -- short requests ---------------------------------------------------------------------------------------------

    def _dispatch(self, name: str, now: float, actions: list[Action]) -> bool:
        """Idle, then co-locate, then preempt (§5); False when it has to wait in the global queue."""
        board, options = self._the_board(), self._options
        short = self._shorts[name]
        tokens, most, beside = short.request.prompt_tokens, options.batch_tokens, False
        free = board.free.least()
        at = free if free >= 0 and not board.weight[free] else -1
        if at < 0:
            at = board.beside.least()
            beside = at >= 0 and board.room(at, tokens, most)
            if not beside:
                at = self._make_room(short, free, now, actions) if options.preempt else -1
        if at < 0 and free >= 0 and (not self._bounded or board.room(free, tokens, most)):
            at = free
        if at < 0:
            return False
        short.replica = at
        board.add(at, short.weight, tokens)
        actions.append(EnqueueRequest(name, (self._ids[at],), "prefill", beside))
        return True

    def _make_room(self, short: ShortRequest, free: int, now: float, actions: list[Action]) -> int:
        """A replica of a paused ring that has room, or of one that is paused now; `free`, where its queue will be over
        before that (not in `paper` mode); -1 when there is none."""
        board, tokens, most = self._the_board(), short.request.prompt_tokens, self._options.batch_tokens
        at = board.paused.least()
        if at >= 0 and not board.room(at, tokens, most):
            at = -1
        ring = board.ring[at] if at >= 0 else self._victims.first(now)
        if ring is None:
            return -1
        if self._weighs and free >= 0 and board.room(free, tokens, most):
            wait_s = 0.0 if ring.state == "paused" else ring.edge_s / 2
            if board.weight[free] < wait_s * _UNITS_A_SECOND + (board.weight[at] if at >= 0 else 0):
                return free
        if at >= 0:
            return at
        self._victims.take(now)
        ring.state = "pausing"
        self.suspensions += 1
        board.open(ring, board.paused)
        actions.append(PreemptRequest(ring.request.id))
        return board.paused.least()

    def _dispatch_all(self, now: float, actions: list[Action]) -> list[Action]:
        """Those of the global queue that have a place now, in order."""
        while self._waiting:
            name = next(iter(self._waiting))
            if not self._dispatch(name, now, actions):
                break
            del self._waiting[name]
        return actions

    def _vacate(self, short: ShortRequest, now: float, actions: list[Action]) -> list[Action]:
        """It has left its replica's queue; others come in its place, or a ring that waited for that goes on."""
        board, at = self._the_board(), short.replica
        if at < 0:
            return actions
        board.done(at, short.weight, short.request.prompt_tokens)
        return self._make_way(at, now, actions)

    def _make_way(self, at: int, now: float, actions: list[Action]) -> list[Action]:
        """A short request has left a replica."""
        self._dispatch_all(now, actions)
        ring = self._the_board().ring[at]
        if ring is not None and not ring.busy:
            if ring.state == "drain":
                self._runs(ring, now)
            elif ring.state in ("paused", "closing"):
                actions += self._go_on(ring, now)
        return actions

    def _weight(self, tokens: int) -> int:
        if not self._options.counts_seconds:
            return tokens
        weight = self._weights.get(tokens)
        if weight is None:
            seconds = self._around.latency.prefill_s(0, tokens, GroupShape(1))
            weight = self._weights[tokens] = max(1, round(seconds * _UNITS_A_SECOND))
        return weight

    def _decode(self, at: int, tokens: int) -> None:
        self._decode_load[at] += tokens
        self._decode_least.put(at, self._decode_load[at])

    # -- long requests ----------------------------------------------------------------------------------------------

    def _take_replicas(self, view: ClusterSnapshot) -> list[Action]:
        """Long requests in order, as far as there are replicas without another one."""
        board = self._the_board()
        actions: list[Action] = []
        while self._longs:
            request = self._longs[0]
            size = self._sizes.replicas(request.prompt_tokens, request.prompt_tokens + request.max_output_tokens)
            if not size:
                self._longs.popleft()
                actions.append(RejectRequest(request.id, "all replicas together cannot hold it"))
                continue
            taken = board.take(size)
            if taken is None:
                break
            self._longs.popleft()
            form = self._forms.choose(request.prompt_tokens, size, taken.nodes)
            self._order += 1
            ring = SequenceParallelGroup(request, taken.replicas, self._order, form.edge_s)
            board.hold(ring)
            self._rings[request.id] = ring
            span = Span(request=request, start=request.cached_tokens, end=request.prompt_tokens,
                        group=self._group_of(ring), strategy=form.strategy)  # fmt: skip
            actions.append(CommitSpans(request.id, (span,), view.version))
            if not ring.busy:
                self._runs(ring, view.now_s)
        return actions

    def _runs(self, ring: SequenceParallelGroup, now: float) -> None:
        """It computes from now on."""
        ring.state = "decode" if ring.decoding else "prefill"
        ring.began_s = now
        self._victims.add(ring)

    def _go_on(self, ring: SequenceParallelGroup, now: float) -> list[Action]:
        """All short prefills in its place have ended."""
        ring.suspended_s += now - ring.since_s
        self._the_board().open(ring, None)
        self._runs(ring, now)
        if ring.decoding:
            return [EnqueueRequest(ring.request.id, self._group_of(ring), "decode", beside=True)]
        return [ResumeRequest(ring.request.id)]

    def _group_of(self, ring: SequenceParallelGroup) -> tuple[int, ...]:
        return tuple(self._ids[replica] for replica in ring.group)

    def _the_board(self) -> ReplicaIndex:
        assert self._board is not None
        return self._board
