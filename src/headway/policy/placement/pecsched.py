"""PecSched (§5) and its settings: short prefills preempt long ones, short decodes run elsewhere, long decodes share
their replicas.

A short request goes, in this order, to an idle replica; to a replica where a long request decodes; to a replica of a
paused long prefill; or a running one is paused for it: all replicas of its group at once, at the next layer edge (the
paper pauses between any two kernels). That takes half a layer on average, a second or more for half a million tokens:
in `default` mode a short request rather joins a queue that ends before. Else it joins the shortest queue of a replica
without a long request, in `default` mode up to `batch_tokens`, and otherwise waits in the global queue. Of several
replicas the shortest queue is taken, so that batches are equally long on every replica of a group, and at most
`batch_tokens` at a time.

A long request waits in its own queue, in order, until enough replicas have no other long one; it takes them all at
once. Its prefill begins when the short requests there have ended (their prefills, if decodes are disaggregated), and
resumes after a pause when the last short request on its replicas has ended. Ageing, which the paper lacks, bounds how
long it is suspended: without it a steady stream of short requests starves it.

What the paper leaves open and is decided here: the youngest long prefill is preempted first; a replica holds one long
request at most; the decode replica with the fewest tokens takes the next short.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

from headway.core.errors import ConfigError
from headway.core.file_sections import Count, PositiveOrZero, Seconds
from headway.core.request import Request, Span
from headway.policy.placement.contract import (
    Action,
    ActionRefused,
    ClusterSnapshot,
    CommitSpans,
    EnqueueRequest,
    Event,
    KvReady,
    PlacementPolicy,
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
    final_tokens,
)
from headway.policy.placement.kv_places import AffinityOptions, decode_instances
from headway.policy.placement.pecsched_replicas import (
    UNITS_A_SECOND,
    AgeingPolicy,
    AgeingQueue,
    CachedPrefixes,
    DecodeInstances,
    GroupSizing,
    PreemptionCandidates,
    QueueWeights,
    ReplicaIndex,
    SequenceParallelGroup,
    ShortRequest,
    StrategyChooser,
)
from headway.policy.placement.registry import PolicyContext


class PecSchedOptions(AffinityOptions):
    """Settings of `pecsched`."""

    long_tokens: Count = 32_768
    """Prompts above this are long."""
    batch_tokens: Count = 4096
    """Tokens of short prompts that a replica of a paused or co-located long request takes at a time (§5.2's threshold).
    """
    colocated_tokens: Count | None = None
    """Largest prompt that is prefilled beside a long decode, whose token waits for it; longer ones pause a long prefill
    or wait for a replica. None: any prompt."""
    long_replicas: Literal["memory", "latency", "fixed"] = "latency"
    """Rule for "sufficient" replicas, which the paper does not state: as memory needs, as latency needs to stay within
    `long_target_s`, or `long_sp`. Never fewer than memory needs."""
    long_target_s: Seconds = 20.0
    """Largest predicted prefill time of a long request, in seconds, for the rule `latency`."""
    long_sp: Count = 4
    """Replicas of a long request for the rule `fixed`."""
    queue: Literal["tokens", "seconds"] | None = None
    """Unit of queue lengths; None: tokens in mode `paper`, else predicted seconds, in which attention is quadratic."""
    ageing: PositiveOrZero | Literal["off"] | None = None
    """A long prefill is suspended for at most so many times as long as it has computed, and `slice_s` more; then it
    computes until that holds again. "off": without bound. None: off in mode `paper`, else 1."""
    slice_s: Seconds = 1.0
    """Seconds added to the time computed when ageing bounds a suspension: see `ageing`."""
    preempt: bool = True
    """False: the ablation /PE (§6.4)."""
    disaggregate: bool = True
    """False: the ablation /Dis: short requests decode where they were prefilled."""
    colocate: bool = True
    """False: the ablation /CoL: long decodes are preempted instead of co-located."""
    fast_sp: bool = True
    """False: the ablation /FSP: plain ring attention."""

    @property
    def counts_seconds(self) -> bool:
        """Whether queues are measured in seconds."""
        return (self.queue or ("tokens" if self.mode == "paper" else "seconds")) == "seconds"

    @property
    def ageing_factor(self) -> float | None:
        """Seconds of suspension allowed for each second of computing; None: without bound."""
        if self.ageing is None:
            return None if self.mode == "paper" else 1.0
        return None if self.ageing == "off" else self.ageing


# a wake-up comes so much after a group may be preempted: `PreemptionCandidates.peek` excludes the very moment
_INSTANT_S = 1e-6


class PecSched(PlacementPolicy):
    """See the module."""

    Index: ClassVar[type[ReplicaIndex]] = ReplicaIndex

    def __init__(self, context: PolicyContext, options: PecSchedOptions) -> None:
        self._context, self._options = context, options
        self._bounds_queues = options.mode != "paper"
        self._compares_waits = self._bounds_queues and options.counts_seconds
        self._index: ReplicaIndex | None = None
        self._prefixes = CachedPrefixes(context, options.affinity, options.counts_seconds)
        self._shorts: dict[str, ShortRequest] = {}
        self._global_queue: dict[str, None] = {}  # short requests that wait, in order
        self._long_queue: deque[Request] = deque()
        self._groups: dict[str, SequenceParallelGroup] = {}
        ageing = AgeingPolicy(options.ageing_factor, options.slice_s)
        self._preemptible, self._paused = PreemptionCandidates(ageing), AgeingQueue(ageing)
        self._decoding_in_place: dict[str, ShortRequest] = {}  # on the replica of their prefill
        self._weights = QueueWeights(context.latency, options.counts_seconds)
        self._committed_longs = 0
        self.suspensions = 0
        """How often long requests were asked to pause."""
        self._handlers: dict[type, Callable[[Any, ClusterSnapshot], list[Action]]] = {
            RequestArrived: self._arrived,
            RequestPrefilled: self._prefilled,
            KvReady: lambda event, _: [EnqueueRequest(event.request, (event.instance,), "decode")],
            SpanDone: self._span_done,
            SpanPaused: self._span_paused,
            RequestFinished: self._finished,
            RequestDropped: self._finished,
            ActionRefused: self._refused,
            WakeupDue: self._woken,
        }

    def on_event(self, event: Event, view: ClusterSnapshot) -> Sequence[Action]:
        if self._index is None:
            self._set_up(view)
        self._prefixes.view = view
        handler = self._handlers.get(type(event))
        return handler(event, view) if handler is not None else []

    def next_wakeup(self, now: float) -> float | None:
        due_s = self._paused.next_s()
        if not self._global_queue or not self._options.preempt:
            return due_s
        retry_s = self._preemptible.next_s()
        if retry_s is None:
            return due_s
        return retry_s + _INSTANT_S if due_s is None else min(due_s, retry_s + _INSTANT_S)

    def _set_up(self, view: ClusterSnapshot) -> None:
        """Make the indexes for the instances of the first snapshot."""
        options = self._options
        self._ids = view.with_role("mixed", "prefill")
        decodes = view.with_role("decode")
        if not self._ids:
            raise ConfigError("pecsched needs at least one instance of role mixed or prefill")
        if options.disaggregate and not decodes:
            raise ConfigError("pecsched keeps short decodes apart: give some instances the role decode, or say "
                              "`disaggregate: false`")  # fmt: skip
        nodes = [view.instances[i].node for i in self._ids]
        self._index = self.Index(nodes)
        self._decoding = DecodeInstances(decodes)
        first = view.instances[self._ids[0]]
        per_node = max(map(nodes.count, set(nodes)))
        self._strategies = StrategyChooser(self._context, first.tp, options.fast_sp)
        # group sizes assume equal replicas: the smallest capacity is safe for all
        capacity = self._capacity = min(view.instances[i].capacity for i in self._ids)
        self._sizes = GroupSizing(
            options.long_replicas, self._strategies, capacity, len(self._ids), per_node, options.long_target_s,
            options.long_sp,
        )  # fmt: skip

    # -- what happens to requests -----------------------------------------------------------------------------------

    def _arrived(self, event: RequestArrived, view: ClusterSnapshot) -> list[Action]:
        now = view.now_s
        request = event.request
        self._prefixes.note(event)
        apart = self._options.disaggregate and request.max_output_tokens > 1
        alone = not apart or decode_instances(view, final_tokens(request)) == view.with_role("decode")
        if not alone or self._prefixes.is_long(request, self._options.long_tokens, self._sizes):
            self._long_queue.append(request)
            return self._commit_longs(view)
        name = request.id
        weight = self._weights.weight(request.prompt_tokens - request.cached_tokens)
        self._shorts[name] = ShortRequest(request, weight, request.prompt_tokens)
        actions: list[Action] = []
        # in order of arrival: nothing overtakes the requests that wait already
        if self._global_queue or not self._dispatch(name, now, actions):
            self._global_queue[name] = None
            self._dispatch_all(now, actions)
        return actions

    def _prefilled(self, event: RequestPrefilled, view: ClusterSnapshot) -> list[Action]:
        short = self._shorts.get(event.request)
        if short is None:
            return []
        del self._shorts[event.request]
        actions: list[Action] = []
        if not self._options.disaggregate:
            # /Dis: the request occupies its replica until it ends, not only while it prefills
            self._decoding_in_place[event.request] = short
            self._replicas().add_decodes(short.replica, 1)
            actions.append(EnqueueRequest(event.request, event.group, "decode", concurrent=True))
        elif short.request.max_output_tokens > 1:
            actions.append(TransferKv(event.request, self._decoding.place(short.request), overlapped=True))
        return self._end_prefill(short, view.now_s, actions)

    def _span_done(self, event: SpanDone, view: ClusterSnapshot) -> list[Action]:
        now = view.now_s
        group = self._groups.get(event.request)
        if group is None or not event.last:
            return []
        group.decoding, group.state, group.began_s = True, "decode", now
        actions: list[Action] = []
        if group.request.max_output_tokens > 1:
            actions.append(EnqueueRequest(event.request, self._instances_of(group.replicas), "decode", concurrent=True))
        replicas = self._replicas()
        # co-located, its replicas take short prefills while it decodes; else (/CoL) it is preempted like a prefill
        if self._options.colocate:
            replicas.move_to(group, replicas.colocated)
        else:
            replicas.move_to(group, None)
            self._preemptible.add(group)
        return self._dispatch_all(now, actions)

    def _span_paused(self, event: SpanPaused, view: ClusterSnapshot) -> list[Action]:
        now = view.now_s
        group = self._groups.get(event.request)
        if group is None:
            return []
        group.state = "paused"
        group.paused_at_s = now
        # ageing compares suspension with the time that it really computed
        group.computed_s += now - group.began_s
        self._paused.add(group)
        return [] if group.busy else self._resume(group, now)

    def _finished(self, event: RequestFinished | RequestDropped, view: ClusterSnapshot) -> list[Action]:
        now = view.now_s
        name = event.request
        self._prefixes.forget(name)
        short = self._shorts.pop(name, None)
        if short is not None:
            self._global_queue.pop(name, None)
            return self._end_prefill(short, now, [])
        short = self._decoding_in_place.pop(name, None)
        if short is not None:
            self._replicas().add_decodes(short.replica, -1)
            return self._use_room(short.replica, now, [])
        if self._decoding.remove(name):
            return []
        group = self._groups.pop(name, None)
        if group is None:
            self._long_queue = deque(request for request in self._long_queue if request.id != name)
            return []
        group.state = "ended"
        self._replicas().release(group)
        # the next long request takes its replicas before short ones are sent there
        return self._dispatch_all(now, self._commit_longs(view))

    def _refused(self, event: ActionRefused, view: ClusterSnapshot) -> list[Action]:
        if event.request in self._decoding:
            return [RejectRequest(event.request, f"it cannot be decoded: {event.why}")]
        group = self._groups.get(event.request)
        if group is None:
            return []
        # in its last layer: short requests sent there wait for its end
        if event.action == "preempt" and group.state == "pausing":
            group.state = "decode" if group.decoding else "prefill"
            self._replicas().move_to(group, None)
        elif event.action == "commit":
            del self._groups[event.request]
            group.state = "ended"
            self._replicas().release(group)
            # made from a stale snapshot: it keeps its place, and is tried again
            self._long_queue.appendleft(group.request)
            return self._commit_longs(view)
        return []

    def _woken(self, event: WakeupDue, view: ClusterSnapshot) -> list[Action]:
        now = view.now_s
        actions: list[Action] = []
        self._dispatch_all(now, actions)
        for group in self._paused.due(now):
            # it takes no more short requests, so that those there are the last before it resumes
            group.state = "closing"
            self._replicas().move_to(group, None)
            if not group.busy:
                actions += self._resume(group, now)
        return actions

    # -- short requests ---------------------------------------------------------------------------------------------

    def _dispatch(self, name: str, now: float, actions: list[Action]) -> bool:
        """Place a short request: idle, then co-locate, then preempt (§5); return False if it must wait in the global
        queue."""
        replicas, options = self._replicas(), self._options
        short = self._shorts[name]
        tokens, most, concurrent = self._prefixes.uncached_tokens(short.request), options.batch_tokens, False
        free = replicas.free.argmin()
        # 1. an idle replica: if the shortest queue is not empty, none is
        at = free if free >= 0 and not replicas.weight[free] else -1
        if at < 0:
            # 2. together with a long decode
            at = replicas.colocated.argmin()
            cap = options.colocated_tokens
            concurrent = at >= 0 and replicas.fits(at, tokens, most) and (cap is None or tokens <= cap)
            if not concurrent:
                # 3. in place of a long prefill
                at = self._preempt_for(short, free, now, actions) if options.preempt else -1
        # 4. the shortest queue of a replica without a long request
        if at < 0 and free >= 0 and (not self._bounds_queues or replicas.fits(free, tokens, most)):
            at = free
        if at < 0:
            return False
        at, prefix = self._prefixes.place(short, at, self._ids, replicas, most if self._bounds_queues else None)
        short.replica = at
        replicas.add_prefill(at, short.weight, short.tokens)
        actions.append(EnqueueRequest(name, (self._ids[at],), "prefill", concurrent, prefix))
        return True

    def _preempt_for(self, short: ShortRequest, free: int, now: float, actions: list[Action]) -> int:
        """Return a replica of a paused group that may take the prompt, or of a group that is paused for it; `free`, if
        its queue ends before that (not in `paper` mode); -1 if there is none."""
        tokens, most = self._prefixes.uncached_tokens(short.request), self._options.batch_tokens
        replicas = self._replicas()
        at = replicas.paused.argmin()
        if at >= 0 and not replicas.fits(at, tokens, most):
            at = -1
        group = replicas.group[at] if at >= 0 else self._preemptible.peek(now)
        if group is None or not group.leaves_room(short.request.prompt_tokens, self._capacity):
            return -1
        if self._compares_waits and free >= 0 and replicas.fits(free, tokens, most):
            # a pause takes effect half an interval after it is asked for, on average
            wait_s = 0.0 if group.state == "paused" else group.pause_interval_s / 2
            if replicas.weight[free] < wait_s * UNITS_A_SECOND + (replicas.weight[at] if at >= 0 else 0):
                return free
        if at >= 0:
            return at
        self._preemptible.pop(now)
        group.state = "pausing"
        self.suspensions += 1
        # now, not at SpanPaused: prompts sent there meanwhile wait for the pause in the instances' queues
        replicas.move_to(group, replicas.paused)
        actions.append(PreemptRequest(group.request.id))
        return replicas.paused.argmin()

    def _dispatch_all(self, now: float, actions: list[Action]) -> list[Action]:
        """Place requests of the global queue in order, until one must wait."""
        while self._global_queue:
            name = next(iter(self._global_queue))
            if not self._dispatch(name, now, actions):
                break
            del self._global_queue[name]
        return actions

    def _end_prefill(self, short: ShortRequest, now: float, actions: list[Action]) -> list[Action]:
        """Take a short request out of its replica's queue, and let waiting requests take its place."""
        replicas, at = self._replicas(), short.replica
        if at < 0:
            return actions
        replicas.end_prefill(at, short.weight, short.tokens)
        return self._use_room(at, now, actions)

    def _use_room(self, at: int, now: float, actions: list[Action]) -> list[Action]:
        """Dispatch waiting requests after a short request left replica `at`; start or resume its group if it is the
        last."""
        self._dispatch_all(now, actions)
        group = self._replicas().group[at]
        if group is not None and not group.busy:
            if group.state == "drain":
                self._start(group, now)
            elif group.state in ("paused", "closing"):
                actions += self._resume(group, now)
        return actions

    # -- long requests ----------------------------------------------------------------------------------------------

    def _commit_longs(self, view: ClusterSnapshot) -> list[Action]:
        """Commit long requests in order, as long as enough replicas have no other one."""
        replicas = self._replicas()
        actions: list[Action] = []
        while self._long_queue:
            request = self._long_queue[0]
            size = self._sizes.replicas(self._prefixes.uncached_tokens(request), final_tokens(request))
            if not size:
                self._long_queue.popleft()
                actions.append(RejectRequest(request.id, "all replicas together cannot hold it"))
                continue
            taken = replicas.take(size)
            # strictly in order: smaller requests that overtook it could delay it for ever
            if taken is None:
                break
            self._long_queue.popleft()
            ids = self._instances_of(taken.replicas)
            choice, prefix = self._prefixes.choose(request, ids, taken.nodes, self._strategies)
            self._committed_longs = order = self._committed_longs + 1
            group = SequenceParallelGroup(request, taken.replicas, order, choice.pause_interval_s, choice.prefill_s)
            replicas.occupy(group)
            self._groups[request.id] = group
            start = request.cached_tokens if prefix is None else prefix.tokens
            span = Span(request=request, start=start, end=request.prompt_tokens, group=ids, strategy=choice.strategy)
            actions.append(CommitSpans(request.id, (span,), view.version, prefix=prefix))
            if not group.busy:
                self._start(group, view.now_s)
        return actions

    def _start(self, group: SequenceParallelGroup, now: float) -> None:
        """Note that a group computes from now on."""
        group.state = "decode" if group.decoding else "prefill"
        group.began_s = now
        self._preemptible.add(group)

    def _resume(self, group: SequenceParallelGroup, now: float) -> list[Action]:
        """Resume a paused group: all short prefills on its replicas have ended."""
        group.suspended_s += now - group.paused_at_s
        self._replicas().move_to(group, None)
        self._start(group, now)
        if group.decoding:
            return [EnqueueRequest(group.request.id, self._instances_of(group.replicas), "decode", concurrent=True)]
        return [ResumeRequest(group.request.id)]

    def _instances_of(self, replicas: Sequence[int]) -> tuple[int, ...]:
        return tuple(self._ids[replica] for replica in replicas)

    def _replicas(self) -> ReplicaIndex:
        assert self._index is not None
        return self._index
