"""The controller's backend over native instances: spans, residency in schedulers and KV migrations become messages;
expectations are predicted times.

Times are seconds of `time.monotonic()`, as the controller is called with.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from headway.control.backend import ActionImpossible, SchedulerStats
from headway.control.entries import ControlledRequest, KvSlice, SpanEntry
from headway.control.kv import KvAdmission, KvClaim, gives_way, kv_needs
from headway.core.request import Phase, Request, Span, SpanTask, Strategy
from headway.perf.hardware import ModelShape
from headway.perf.latency.groups import GroupLatency, GroupShape, batch_s, pause_points_of
from headway.policy.placement.contract import NATIVE_CAPABILITIES
from headway.runtime.cluster.decodes import GroupDecodeSteps, LiveResidency
from headway.runtime.cluster.instances import InstanceLoad
from headway.runtime.cluster.membership import PeerHealth
from headway.runtime.cluster.requests import (
    AttemptTable,
    BackendEvent,
    BatchComplete,
    DecodeOver,
    InstanceRegistry,
    KvMovement,
    RequestAttempt,
    RequestReleased,
    ReservedKv,
    SliceSent,
)
from headway.runtime.engine.protocol import (
    ComputeSpan,
    EngineInfo,
    KvArrived,
    OutputDelta,
    PauseRequest,
    ReserveKv,
    ResumeSpan,
    SendKv,
    SpanTaskDone,
    SpanTaskPaused,
    SubmitRequest,
)

# Spans on live instances: begun on their groups, paused, resumed, and reported when all of a group have reported.
#
# A batch (`policy.placement.contract.CommitSpans.batched_with`) is computed one span task after the other, on a group
# of its own, and is reported complete at the end of its last task. # On an instance that can only compute whole prompts
# (no KV moves from or to it), a span that is a whole prompt is given to the scheduler, and ends as a span with the
# first token.


class LiveSpanBatch:
    """Progress of a batch of spans that is being computed, kept at its first entry."""

    __slots__ = ("done", "over", "paused")

    def __init__(self) -> None:
        self.done: set[str] = set()
        """Members whose task is complete."""
        self.over: set[str] = set()
        """Members that have all of their output with it."""
        self.paused: SpanTaskPaused | None = None
        """The last pause report."""


class LiveSpanRuns:
    def __init__(
        self,
        registry: InstanceRegistry,
        rooms: KvAdmission,
        shape: ModelShape,
        rows: int,
        submit: Callable[[RequestAttempt, int, Phase], None],
    ) -> None:
        """rows: see `SpanTask.rows`. submit: gives a whole request to an instance's scheduler."""
        self._registry, self._rooms, self._shape, self._rows, self._submit = registry, rooms, shape, rows, submit

    def fits(self, entry: SpanEntry) -> bool:
        """See `InstanceBackend.fits`. A prompt that a scheduler computes gets its blocks from that scheduler, chunk by
        chunk."""
        return not self.computes(entry) or self._rooms.fits(entry)

    def committed(self, entry: SpanEntry, now: float) -> None:
        """Send the prompts of a committed batch to its group, ahead of its turn."""
        for member in (entry, *entry.batched_with):
            if self.computes(member):
                self._registry.admit(_attempt(member.controlled), member.group)

    def begin(self, entry: SpanEntry, now: float) -> None:
        """Begin or resume a span, or a batch of them."""
        if self.computes(entry):
            self._rooms.begun(entry)
        attempt = _attempt(entry.controlled)
        if entry.resumed:
            attempt.running = set(entry.group)
            self._registry.tell(entry.group, ResumeSpan(attempt.wire))
            return
        entry.backend_state = LiveSpanBatch()
        self._next(entry)

    def pause(self, entry: SpanEntry, now: float) -> None:
        """Pause a span at the next layer edge. Raises ActionImpossible when part of its group is done with it."""
        attempt = _attempt(entry.controlled)
        if not self.computes(entry) or attempt.running != set(entry.group):
            raise ActionImpossible(f"{entry.owner} cannot be paused any more")
        # Only the first instance is asked: the others follow it, so that all stop at the same layer.
        self._registry.tell(entry.group[:1], PauseRequest(attempt.wire))

    def done(self, number: int, attempt: RequestAttempt, message: SpanTaskDone) -> SpanEntry | None:
        """Handle `SpanTaskDone`; return the entry that is complete with it, for a batch its first."""
        entry = attempt.entry
        # Late: of a task before the present one.
        if entry is None or number not in attempt.running or message.index != entry.index:
            return None
        lead = entry.batch_leader or entry
        asked = attempt.asked
        if asked.first_s is None and not attempt.said:
            asked.first_s = message.began_s
        if message.cached_tokens:
            # of a group, the instance that computes the longest for it
            asked.cached_tokens, asked.saved_s = message.cached_tokens, max(asked.saved_s, message.saved_s)
        if message.delta is not None:
            asked.tell(message.delta)
            if message.delta.finish is not None:
                attempt.finished = True
                lead.backend_state.over.add(entry.owner)
        attempt.running.discard(number)
        return None if attempt.running else self._complete(attempt, entry)

    def paused(self, number: int, attempt: RequestAttempt, message: SpanTaskPaused) -> SpanEntry | None:
        """Handle `SpanTaskPaused`; return the entry once its whole group has paused."""
        entry = attempt.entry
        if entry is None or number not in attempt.running or message.index != entry.index:
            return None
        attempt.running.discard(number)
        entry.backend_state.paused = message
        return None if attempt.running else entry

    def first_token(self, attempt: RequestAttempt, delta: OutputDelta) -> SpanEntry | None:
        """Complete the span that is a whole prompt on one scheduler: it has its first token."""
        entry = attempt.entry
        if entry is None:
            return None
        if delta.finish is not None:
            (entry.batch_leader or entry).backend_state.over.add(entry.owner)
        return self._complete(attempt, entry)

    def left(self, attempt: RequestAttempt) -> SpanEntry | None:
        """Continue the batch of a request that has ended; return its first entry if the batch is complete with that."""
        # Cleared before the next member starts: reports of the ended task must find nothing.
        entry = attempt.entry
        attempt.entry = None
        attempt.running.clear()
        if entry is None or (entry.backend_state is None and entry.batch_leader is None):
            return None
        lead = entry.batch_leader or entry
        return self._next(lead) if lead.state == "running" and lead.backend_state is not None else None

    def _complete(self, attempt: RequestAttempt, entry: SpanEntry) -> SpanEntry | None:
        attempt.entry = None
        # On a scheduler (`at`) the KV is that scheduler's, and no holder to take slices from.
        if attempt.at is None:
            attempt.spread = entry.group if len(entry.group) > 1 else ()
            attempt.whole = set() if attempt.spread else set(entry.group)
        lead = entry.batch_leader or entry
        lead.backend_state.done.add(entry.owner)
        return self._next(lead)

    def _next(self, lead: SpanEntry) -> SpanEntry | None:
        """Begin the batch's next task; return the batch's first entry when there is none left."""
        left = (e for e in (lead, *lead.batched_with) if e.owner not in lead.backend_state.done)
        entry = next((e for e in left if not e.controlled.ended), None)
        if entry is None:
            return lead
        attempt = _attempt(entry.controlled)
        attempt.entry = entry
        if not self.computes(entry):
            self._submit(attempt, entry.group[0], "all")
            return None
        span = entry.span
        run = self._run(span, entry.group)
        prefix = entry.controlled.prefix
        cached = prefix is not None and span.start > 0 and not entry.index
        if prefix is not None and cached:
            attempt.prefix = (SpanTask(0, span.start, (prefix.instance,)),)
        compute = ComputeSpan(
            id=attempt.wire,
            index=entry.index,
            run=run,
            before=(*attempt.prefix, *attempt.runs),
            last=entry.last,
            beside=entry.concurrent,
            preemptible=not entry.batched_with and entry.batch_leader is None,
            cached=cached,
        )
        self._registry.admit(attempt, entry.group)
        # `before` above is a copy made without this task: the layout that the instances find.
        attempt.runs.append(run)
        attempt.running = set(entry.group)
        # To all of the group at once and in one order: groups that overlap cannot wait for each other.
        self._registry.tell(entry.group, compute)
        return None

    def _run(self, span: Span, group: tuple[int, ...]) -> SpanTask:
        """Return the task that computes a span.

        Uneven nodes count as one node. A ring replaces Ulysses where the model's heads cannot be divided by the group,
        or instances are tensor-parallel; the result is the same.
        """
        # `node`: instances per node; None: the group is, or counts as, one node.
        size, nodes = len(group), len({self._registry[i].node for i in group})
        node = size // nodes if nodes > 1 and size % nodes == 0 else None
        strategy, width = span.strategy, node or size
        if max(self._registry[i].ranks for i in group) > 1:
            if strategy.attn == "ulysses":
                strategy = Strategy("ring", strategy.mlp)
        elif "ulysses" in (strategy.attn, strategy.mlp) and not self._shape.heads_divide(width):
            strategy = Strategy("ring" if size > 1 else "local")
        return SpanTask(span.start, span.end, group, strategy, node, rows=self._rows)

    def computes(self, entry: SpanEntry) -> bool:
        """Whether a span is a task of its group; otherwise a scheduler computes it as a whole prompt."""
        return all((one := self._registry.get(i)) is not None and one.moves_kv for i in entry.group)


def _attempt(controlled: ControlledRequest) -> RequestAttempt:
    attempt: RequestAttempt = controlled.backend_state
    return attempt


# KV migrations between instances: a reservation on the target first, then the slices, then the action that waits.
#
# The controller grants a slice when the target has reserved blocks for it (`ready`); it is sent layer by layer while
# its span is computed. When another span of the request has begun meanwhile, the KV has been spread over that span's
# group: such a slice waits until the last span is computed, and all instances of that group send their part of it. (A
# span of a batch that has begun may have to wait for other members' tasks; so do its slices.)

_WHAT = "move"


class LiveKvMigrations:
    def __init__(self, registry: InstanceRegistry, attempts: AttemptTable, sent: Callable[[KvSlice], None]) -> None:
        """sent: called with each slice of the controller that has arrived."""
        self._registry, self._attempts, self._sent = registry, attempts, sent
        self._serial = self._asked = 0

    @property
    def under_way(self) -> int:
        """Number of movements that have not arrived."""
        return sum(len(attempt.moving) for attempt in self._attempts)

    @property
    def waiting(self) -> bool:
        """Whether a request waits for a reservation on some instance."""
        return any(not reserved.granted for attempt in self._attempts for reserved in attempt.room.values())

    def ready(self, piece: KvSlice) -> bool:
        """Return whether a slice could be sent now; reserve blocks for it on its target."""
        attempt, entry = self._attempts.named(piece.request), piece.entry
        if attempt is None:
            return True
        if entry is None and (attempt.finished or attempt.stopping):
            # The KV of an ended answer is not needed, but the controller waits for the slice: `send` counts it as sent.
            # A decode that is being halted emits another token: its reservation is made when it has stopped.
            return attempt.finished
        self.reserve(attempt, piece.target)
        return attempt.room[piece.target].granted and (entry is None or self._newest(attempt, piece) or _done(attempt))

    def send(self, piece: KvSlice, now: float) -> None:
        """Send a slice that is `ready`.

        A decode that continues may have emitted tokens since blocks were reserved: KV beyond the reservation is not
        sent.
        """
        attempt, entry = self._attempts.named(piece.request), piece.entry
        # The request has ended, and its batch may go on: the slice counts as sent, so that its slot is free again.
        if attempt is None or (entry is None and attempt.finished):
            self._sent(piece)
            return
        # A decode has emitted more tokens than it had when its slice was announced, so `piece.end` is too small.
        known = attempt.kv_tokens
        end = min(known if entry is None else min(piece.end, known), attempt.room[piece.target].tokens)
        # KV that lies otherwise than the slice says: every holder sends its part, with the first of the slices.
        if attempt.step is not None if entry is None else not self._newest(attempt, piece):
            self._together(attempt, piece, end)
        else:
            self.bring(attempt, piece.target, (piece.source,), piece.start, end, partial(self._there, attempt, piece))

    @staticmethod
    def _newest(attempt: RequestAttempt, piece: KvSlice) -> bool:
        """Whether the slice's span is the newest task: it has begun, and no later one has spread its KV anew."""
        return piece.entry is not None and len(attempt.runs) == piece.entry.index + 1

    def _together(self, attempt: RequestAttempt, piece: KvSlice, end: int) -> None:
        """Let one movement from all holders stand for all slices of the same tokens and target."""
        key = piece.target, piece.start, end
        if key not in attempt.together:
            attempt.together[key] = []
            holders = attempt.spread or attempt.runs[-1].group
            self.bring(attempt, piece.target, holders, piece.start, end, partial(self._all_there, attempt, key))
        pieces = attempt.together[key]
        if pieces is None:
            self._there(attempt, piece)
        else:
            pieces.append(piece)

    def computed(self, attempt: RequestAttempt) -> None:
        """Report slices that arrived before their span was complete."""
        early, attempt.early = attempt.early, []
        for piece in early:
            self._there(attempt, piece)

    def gather(self, attempt: RequestAttempt, target: int, then: Callable[[], None]) -> None:
        """Bring all KV of a request to one instance, wherever the policy assumes it; then call `then`."""
        holders = attempt.spread or tuple(sorted(attempt.whole))
        self.bring(attempt, target, holders, 0, attempt.kv_tokens, then)

    def bring(
        self,
        attempt: RequestAttempt,
        target: int,
        holders: Sequence[int],
        start: int,
        end: int,
        then: Callable[[], None],
    ) -> None:
        """Move the KV of tokens [start, end) that `holders` have to `target`; call `then` when all of it has arrived.

        Each holder sends what it has of the range, which may be nothing, and reports that too.
        """
        self._serial += 1
        attempt.moving[self._serial] = KvMovement(set(holders), then)
        self.reserve(attempt, target)
        send = SendKv(id=attempt.wire, piece=self._serial, start=start, end=end, to=target)
        if attempt.room[target].granted:
            self._registry.tell(holders, send)
        else:
            attempt.unsent += ((source, send) for source in holders)

    def announced(self, controlled: ControlledRequest, target: int, now: float) -> None:
        """Reserve blocks on a target ahead of the transfer, unless the KV will have grown by then."""
        attempt: RequestAttempt = controlled.backend_state
        # A decode that runs, or is about to stop, emits more tokens: its reservation is made when it has stopped.
        if not attempt.stopping and not attempt.finished and attempt.step is None:
            self.reserve(attempt, target)

    def reserve(self, attempt: RequestAttempt, target: int) -> None:
        """Ask an instance to reserve blocks for all KV of a request, once per target.

        As soon as the target is known, so that slices do not occupy their senders while they wait for blocks.
        """
        if target not in attempt.room:
            self._registry.admit(attempt, (target,))
            self._registry.kv.make(target, attempt.request.id, _WHAT, attempt.kv_tokens)
            # The serial tells this reservation's answer from that of an earlier one, which may still be on its way.
            self._asked += 1
            attempt.room[target] = ReservedKv(self._asked, attempt.kv_tokens)
            self._registry.tell((target,), ReserveKv(attempt.wire, attempt.kv_tokens, self._asked))

    def reserved(self, attempt: RequestAttempt, target: int, serial: int) -> None:
        """Handle `ReserveKv`: send what waits for that reservation. Answers to an earlier serial are ignored."""
        reserved = attempt.room.get(target)
        if reserved is not None and serial == reserved.serial:
            reserved.granted = True
            # The instance sent a snapshot before this answer: from now on that shows the blocks as used.
            self._registry.kv.kept(target, attempt.request.id, _WHAT)
            for source, send in attempt.unsent:
                if send.to == target:
                    self._registry.tell((source,), send)
            attempt.unsent = [one for one in attempt.unsent if one[1].to != target]

    def arrived(self, attempt: RequestAttempt, message: KvArrived) -> None:
        """Handle `KvArrived`: one holder's part of a movement is there; the last one calls `then`."""
        movement = attempt.moving.get(message.piece)
        if movement is None:
            return
        movement.sources.discard(message.source)
        if not movement.sources:
            del attempt.moving[message.piece]
            movement.then()

    def settled(self, attempt: RequestAttempt) -> None:
        """Withdraw a request's reservations and unsent slices: its KV is where it is decoded."""
        self._registry.kv.forget(attempt.request.id, _WHAT)
        attempt.room.clear()
        attempt.unsent.clear()
        attempt.together.clear()

    def forget(self, attempt: RequestAttempt) -> None:
        """Drop all movements and reservations of a request. The instances drop theirs at `AbortRequest`."""
        attempt.moving.clear()
        attempt.early.clear()
        self.settled(attempt)

    def _there(self, attempt: RequestAttempt, piece: KvSlice) -> None:
        """Report an arrived slice, once its span is complete on all of its group."""
        if piece.entry is not None and piece.entry.state == "running":
            attempt.early.append(piece)
        else:
            self._sent(piece)

    def _all_there(self, attempt: RequestAttempt, key: tuple[int, int, int]) -> None:
        pieces, attempt.together[key] = attempt.together.get(key), None
        for piece in pieces or ():
            self._there(attempt, piece)


def _done(attempt: RequestAttempt) -> bool:
    """Whether all spans of a request that were committed are computed."""
    return not attempt.running and len(attempt.runs) >= len(attempt.controlled.entries)


_ALONE = GroupShape(1)
LatencyOf = Callable[[EngineInfo | None], GroupLatency]
"""From an instance's report to the predictor of its times; None: the instance is not there now."""


def kv_claim(attempt: RequestAttempt, blocks: Callable[[int, int], int]) -> KvClaim:
    """Return the claim of an attempt, at most what it can come to. blocks: rounds (instance, tokens) up to blocks."""
    known = attempt.kv_tokens
    # The whole prompt's from the begin of its first span on: `KvAdmission` has reserved that.
    if attempt.entry is not None and attempt.runs:
        has = kv_needs(attempt.entry)
    elif attempt.spread:
        has = dict.fromkeys(attempt.spread, -(-known // len(attempt.spread)))
    else:
        has = dict.fromkeys(attempt.whole, known)
    needs, turns = {}, {}
    for number, reserved in attempt.room.items():
        # Beside the instance's share of spans, if it has one: the two lie apart.
        tokens = blocks(number, reserved.tokens)
        if reserved.granted:
            has[number] = tokens + has.get(number, 0)
        else:
            needs[number], turns[number] = tokens, reserved.serial
    if attempt.at is not None:
        has[attempt.at] = max(known, has.get(attempt.at, 0))
        needs[attempt.at] = needs.get(attempt.at, 0) + attempt.asked.left
    has = {number: blocks(number, tokens) for number, tokens in has.items()}
    return KvClaim(attempt.request.id, has, needs, turns, attempt.at is not None and not turns)


class LiveBackend:
    """The `control.backend.InstanceBackend` of live instances."""

    capabilities = NATIVE_CAPABILITIES

    def __init__(
        self,
        registry: InstanceRegistry,
        latency_of: LatencyOf,
        shape: ModelShape,
        in_place: bool,
        rows: int,
        clock: Callable[[], float],
    ) -> None:
        """latency_of: predictor of an instance, and of a group that begins with it. in_place: groups decode where KV
        lies. rows: see `SpanTask.rows`.
        """
        self.registry = registry
        self.attempts = attempts = AttemptTable()
        self._latency_of, self._clock = latency_of, clock
        self.events: deque[BackendEvent] = deque()
        """What has happened during calls, in order: `ClusterDriver` takes it after each of them."""
        self._latencies: dict[int, tuple[EngineInfo | None, GroupLatency]] = {}
        self._layers = shape.layers
        self.peers = PeerHealth()
        self.loads: dict[int, InstanceLoad] = {}
        self.moves = LiveKvMigrations(registry, attempts, self._sent)
        self.announced, self.ready, self.send = self.moves.announced, self.moves.ready, self.moves.send
        self.steps = GroupDecodeSteps(registry)
        self.stays = LiveResidency(registry, self.moves, self.steps, in_place, self._placed, self._over)
        self.rooms = KvAdmission(registry.kv, clock)
        self.runs = LiveSpanRuns(registry, self.rooms, shape, rows, self.stays.submit)
        self.fits, self.committed = self.runs.fits, self.runs.committed
        self.begin, self.pause = self.runs.begin, self.runs.pause

    # -- predictions --------------------------------------------------------------------------------------------------

    def span_s(self, spans: Sequence[Span], nodes: int, before: tuple[int, ...]) -> float:
        for span in spans:
            if any(self.registry.get(i) is None for i in span.group):
                raise ActionImpossible(f"{span.group} are not all there")
        shape = GroupShape(len(spans[0].group), nodes, spans[0].strategy)
        return batch_s(self._latency(spans[0].group[0]), ((span.start, span.end - span.start) for span in spans), shape)

    def prefill_estimate(self, request: Request, group: tuple[int, ...]) -> tuple[int, float]:
        tokens = request.prompt_tokens - request.cached_tokens
        return tokens, self._latency(group[0]).prefill_s(request.cached_tokens, tokens, _ALONE)

    def busy_s(self, group: tuple[int, ...]) -> float:
        # A group begins together: it is busy until its slowest member is free. 0: free now.
        left_s = max(self.load(i).left_s for i in group)
        return self._clock() + left_s if left_s else 0.0

    def refresh(self, instance: int) -> SchedulerStats:
        one, load = self.registry.get(instance), self.load(instance)
        if one is None:
            return SchedulerStats()
        load.take(one.stats)
        left_s = load.left_s
        free_at_s = self._clock() + left_s if left_s else 0.0
        return SchedulerStats(free_at_s, load.queued, one.stats.kv_tokens_used, load.requests)

    # -- actions ------------------------------------------------------------------------------------------------------

    def stop(self, entry: SpanEntry, now: float) -> None:
        """Do nothing: the request is forgotten next, which stops the span."""

    def enter(self, controlled: ControlledRequest, group: tuple[int, ...], phase: Phase, now: float) -> None:
        attempt: RequestAttempt = controlled.backend_state
        self.stays.enter(attempt, group, phase)
        for i in group:
            self.load(i).entered(attempt.request.id)

    def leave(self, controlled: ControlledRequest, why: str, now: float) -> int:
        attempt: RequestAttempt = controlled.backend_state
        for i in controlled.group:
            self.load(i).left(attempt.request.id)
        if why == "moved":
            self.stays.leave(attempt)
        return attempt.said

    def forget(self, controlled: ControlledRequest, why: str | None, now: float) -> bool:
        attempt: RequestAttempt = controlled.backend_state
        name = attempt.request.id
        # The estimate first, then reservations, then the message that frees the KV itself on each instance.
        for load in self.loads.values():
            load.remove(name)
        self.rooms.forget(name)
        self.registry.forget(attempt)
        self.moves.forget(attempt)
        self.attempts.remove(attempt)
        # A batch continues with its next member; it may be complete because this one was the last.
        complete = self.runs.left(attempt)
        if complete is not None:
            self.events.append(BatchComplete(complete))
        self.events.append(RequestReleased(attempt, why))
        return True

    def pump(self, now: float) -> None:
        """Stop decodes that no group is to compute any more. Schedulers continue by themselves."""
        self.stays.pump()

    def held(self, holder: str, group: tuple[int, ...], now: float) -> None:
        """Do nothing: a span that has not begun does not run."""

    def released(self, holder: str, instances: Iterable[int], now: float) -> None:
        """As `held`."""

    # -- for the driver -----------------------------------------------------------------------------------------------

    def check(self, submit: SubmitRequest) -> None:
        """Do nothing: engines can be asked for all that requests ask for."""

    def meet(self) -> None:
        """Let instances know each other's addresses: some have come or gone."""
        self.registry.meet()

    def lost(self, number: int) -> bool:
        """Forget the load of an instance that is gone; return whether it was ended from here (`PeerHealth`)."""
        self.loads.pop(number, None)
        return self.peers.gone(number)

    def abandon(self, attempt: RequestAttempt) -> None:
        """Free the instances of an attempt directly: the controller could not."""
        self.registry.forget(attempt)

    def gives_way(self, ages: Mapping[str, int]) -> tuple[RequestAttempt, bool] | None:
        """Return the attempt to begin again so that others can have their KV (`control.kv`), and whether that lets
        another go on; None: all can go on. ages: place of each client's request, oldest first."""
        kv = self.registry.kv
        found = None
        if kv.grown and self.moves.waiting:
            attempts = sorted(self.attempts, key=lambda attempt: ages.get(attempt.asked.submit.id, -1))
            found = gives_way([kv_claim(attempt, self.registry.kv_blocks) for attempt in attempts], kv.total)
        attempt = None if found is None else self.attempts.named(found[0])
        # After one has given way, others may still wait for each other.
        kv.grown = attempt is not None
        return None if found is None or attempt is None else (attempt, found[1])

    def counts(self) -> dict[str, int]:
        """Return the counts of `ClusterReport` that are of native instances alone."""
        return {
            "transfers": self.moves.under_way,
            "decodes_moved": self.stays.halted,
            "groups_grown": self.steps.grown,
            "groups_shrunk": self.steps.shrunk,
        }

    def load(self, instance: int) -> InstanceLoad:
        """Return the estimate of an instance's load, made at the first call."""
        return self.loads.setdefault(instance, InstanceLoad())

    def paused(self, entry: SpanEntry) -> tuple[int, int, float]:
        """Return where a span has paused: layer, tokens before its current piece, and the elapsed share of its time
        (see `ClusterController.span_paused`)."""
        said, attempt = entry.backend_state.paused, entry.controlled.backend_state
        run = attempt.runs[-1]
        shape = GroupShape(len(run.group), len({self.registry[i].node for i in run.group}), run.strategy)
        points = pause_points_of(self._latency(run.group[0]), run.start, run.end, shape, run.rows, self._layers)
        return said.layer, said.tokens, points.elapsed_share(said.tokens, said.layer)

    def expecting(self) -> list[int]:
        """Return the instances whose schedulers have prompts to compute, whose remaining time has to be refreshed."""
        return [number for number, load in self.loads.items() if load.expects]

    def _latency(self, number: int) -> GroupLatency:
        """Return the predictor of an instance as it is now."""
        one = self.registry.get(number)
        info = None if one is None else one.info
        # By identity: a restarted instance reports a new `EngineInfo`, maybe with another learned table.
        known = self._latencies.get(number)
        if known is None or known[0] is not info:
            known = self._latencies[number] = info, self._latency_of(info)
        return known[1]

    def _sent(self, kv_slice: KvSlice) -> None:
        self.events.append(SliceSent(kv_slice))

    def _over(self, attempt: RequestAttempt) -> None:
        self.events.append(DecodeOver(attempt))

    def _placed(self, attempt: RequestAttempt, number: int) -> None:
        past = attempt.cached[number] if number < len(attempt.cached) else 0
        tokens = attempt.request.prompt_tokens + attempt.said - past
        self.load(number).add(attempt.request.id, tokens, self._latency(number).prefill_s(past, tokens, _ALONE))
