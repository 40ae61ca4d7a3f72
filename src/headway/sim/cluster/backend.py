"""The controller's backend in virtual time: spans, transfers and balancing take predicted times, KV takes room, and the
instances' schedulers are the real ones.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from headway.control.backend import ActionImpossible, InstanceBackend, SchedulerStats
from headway.control.entries import ControlledRequest, KvSlice, SpanEntry
from headway.control.kv import KvAdmission, KvClaim, KvReservations, gives_way, kv_needs, span_members
from headway.core.request import Phase, Request, Span
from headway.kv.block_manager import BlockManager, KvLease
from headway.perf.hardware import ModelShape, NetworkLink
from headway.perf.latency.groups import GroupShape, PausePoints, batch_s, pause_points_of
from headway.policy.placement.contract import CachedPrefix, ClusterState
from headway.sim.cluster.state import ClusterSpec, SimRequest, SimulatedInstance
from headway.sim.engine import SimulatedEngine
from headway.sim.loop import EventKind
from headway.sim.prefix_cache import PrefixCacheUse
from headway.sim.result import SpanWork
from headway.sim.spec import NoiseSource
from headway.sim.vllm.engine import SimulatedVllm
from headway.sim.workload import TraceRequest

if TYPE_CHECKING:
    from headway.sim.cluster.simulation import ClusterSimulation


# Cost of balancing KV inside a prefill: bytes, and the seconds that layer-wise overlap does not hide (Tetris §4.1).
#
# Before a chunk computes on a larger group, the KV of earlier chunks is spread evenly over that group. While the fully
# connected part of a layer computes, which needs no KV, the next layer's KV moves. Exposed are the transfer of the
# first layer, and of every other layer the time by which its transfer exceeds that part.

CONNECTED_SHARE = 0.5
"""Assumed share of the fully connected part in a layer's time: attention takes as long."""


def balance_bytes(shape: ModelShape, past: int, before: int, after: int) -> float:
    """Return the bytes that each new instance receives when a group grows from `before` to `after` instances.

    `past`: tokens of earlier chunks, evenly spread over the `before` instances.
    """
    if after <= before or not past:
        return 0.0
    return past * shape.kv_bytes_per_token / after


def exposed_s(shape: ModelShape, link: NetworkLink, past: int, before: int, after: int, chunk_s: float) -> float:
    """Return the seconds that balancing adds to a chunk of `chunk_s` seconds.

    The senders are the limit: `before` instances send what `after - before` receive.
    """
    count = balance_bytes(shape, past, before, after)
    if not count:
        return 0.0
    per_layer = count * max(1.0, (after - before) / before) / shape.layers
    move_s = link.transfer_s(int(per_layer))
    hidden_s = CONNECTED_SHARE * chunk_s / shape.layers
    # nothing hides the first layer's transfer
    return move_s + (shape.layers - 1) * max(0.0, move_s - hidden_s)


class InstanceBusyTime:
    """Busy seconds of each instance, which may have several spans and batches at once."""

    def __init__(self, instances: int) -> None:
        self.seconds = [0.0] * instances
        """Busy seconds by instance, up to its last pause; `close` adds the time since."""
        # Spans and batches that run, by instance, and the time since which there is at least one.
        self._running = [0] * instances
        self._since_s = [0.0] * instances

    def begin(self, group: Iterable[int], now: float) -> None:
        """Count a span or a batch that begins on the instances of a group."""
        for i in group:
            if not self._running[i]:
                self._since_s[i] = now
            self._running[i] += 1

    def end(self, group: Iterable[int], now: float) -> None:
        """Count the end of a span or a batch on the instances of a group."""
        for i in group:
            self._running[i] -= 1
            if not self._running[i]:
                self.seconds[i] += now - self._since_s[i]

    def close(self, now: float) -> None:
        """Add the busy time of spans and batches that still run; called once, at the end of a run."""
        for i, running in enumerate(self._running):
            if running:
                self.seconds[i] += now - self._since_s[i]
                self._since_s[i] = now


# KV outside of schedulers on simulated instances: of spans, and of requests on their way to where they decode.
#
# It takes blocks of the pool of its instance's engine: the scheduler there has as many fewer. A span begins by the
# rules of live clusters (`control.kv`), but its patience has no end. A transfer reserves blocks for all KV on
# its target when it is announced; its slices are sent when the target has them, as live ones are. A request that enters
# a scheduler frees what it had outside, and is given blocks there anew.


class SimulatedKvRoom:
    """Blocks outside of schedulers, and what waits for them."""

    def __init__(
        self,
        pool_of: Callable[[int], BlockManager],
        freed: Callable[[int], None],
        granted: Callable[[str, int], None] = lambda request, target: None,
    ) -> None:
        """pool_of: the blocks of an instance. freed: called with each instance whose blocks were freed. granted: with
        each request that waited for blocks on a target and has them now."""
        self._pool_of, self._freed, self._granted = pool_of, freed, granted
        self._leases: dict[str, dict[int, KvLease]] = {}
        # requests with a lease, by instance
        self._holders: dict[int, set[str]] = {}
        # transfers that wait for blocks: tokens by target and request, in order of announcement
        self._waiting: dict[int, dict[str, int]] = {}
        # targets on which each waiting request waits
        self._waits = Counter[str]()
        self._kv = KvReservations(self._load)
        self._admission = KvAdmission(self._kv, lambda: 0.0, math.inf)
        # whether blocks were taken, or waited for, since `gives_way` was last asked
        self._taken = False
        self.waited = 0
        """Transfers that did not have blocks at once."""

    def _load(self, number: int) -> tuple[int, int]:
        pool = self._pool_of(number)
        return pool.total_tokens, pool.used_tokens

    # -- spans --------------------------------------------------------------------------------------------------------

    def fits(self, entry: SpanEntry) -> bool:
        """Return whether a span may begin (`InstanceBackend.fits`)."""
        return self._admission.fits(entry)

    def begin(self, entry: SpanEntry) -> None:
        """Take the blocks of a span that begins, and of the members of its batch: for their whole prompts."""
        self._admission.begun(entry)
        for member in span_members(entry):
            self._kv.forget(member.owner)
            for number, tokens in kv_needs(member).items():
                self.hold(member.owner, number, tokens)

    def hold(self, request: str, number: int, tokens: int) -> None:
        """Take blocks for so many tokens of a request, or as many as are free: on an empty pool that is too small, and
        where the batch of a decode that moves has not ended."""
        pool = self._pool_of(number)
        free = pool.free_blocks + pool.held_blocks(_name(request))
        self._take(request, number, min(tokens, free * pool.block_tokens))

    def _take(self, request: str, number: int, tokens: int) -> bool:
        """Return whether a request has blocks for so many tokens now. No change if it has not."""
        held, pool = self._leases.setdefault(request, {}), self._pool_of(number)
        if number in held:
            return pool.grow(held[number], tokens)
        lease = pool.reserve(_name(request), tokens) if tokens else None
        if lease is not None:
            held[number] = lease
            self._holders.setdefault(number, set()).add(request)
            self._taken = True
        return lease is not None

    def outside(self, number: int) -> int:
        """Return the tokens of the blocks outside of an instance's schedulers."""
        blocks = sum(self._leases[request][number].blocks for request in self._holders.get(number, ()))
        return blocks * self._pool_of(number).block_tokens

    # -- transfers ----------------------------------------------------------------------------------------------------

    def announce(self, request: str, target: int, tokens: int) -> None:
        """Reserve blocks for all KV of a request on the target of a transfer, behind those that wait there."""
        waiting = self._waiting.setdefault(target, {})
        # more than the whole pool never fits: the scheduler will refuse it
        tokens = min(tokens, self._pool_of(target).total_tokens)
        if request not in waiting and (waiting or not self._take(request, target, tokens)):
            waiting[request] = tokens
            self._waits[request] += 1
            self.waited += 1
            self._taken = True

    def ready(self, kv_slice: KvSlice) -> bool:
        """Return whether a slice has its blocks (`InstanceBackend.ready`). Transfers to its target that wait get free
        blocks first, first come, first served."""
        waiting = self._waiting.get(kv_slice.target, {})
        while waiting:
            request, tokens = next(iter(waiting.items()))
            if not self._take(request, kv_slice.target, tokens):
                break
            del waiting[request]
            self._waits_less(request)
            self._granted(request, kv_slice.target)
        return kv_slice.request not in waiting

    def _waits_less(self, request: str) -> None:
        self._waits[request] -= 1
        if not self._waits[request]:
            del self._waits[request]

    def _may_deadlock(self) -> bool:
        """Return whether requests may wait for each other's blocks, which `gives_way` takes time to find out.

        A deadlock needs a waiting request that holds blocks where others wait, or that waits on two targets. Otherwise
        each target serves its queue in order."""
        turns = sum(map(len, self._waiting.values()))
        return turns > len(self._waits) or any(
            request in self._waits
            for number, waiting in self._waiting.items()
            if waiting
            for request in self._holders.get(number, ())
        )

    def gives_way(self, residents: Callable[[], Iterable[KvClaim]]) -> str | None:
        """Return the request that has to give up its blocks so that the others can go on (`control.kv`);
        None: all can. residents: claims of the requests in schedulers, in blocks."""
        # requests that give up or get what they wait for let no others wait for each other
        taken, self._taken = self._taken, False
        if not taken or not self._may_deadlock():
            return None
        needs: dict[str, dict[int, int]] = {}
        turns: dict[str, dict[int, int]] = {}
        for number, waiting in self._waiting.items():
            for turn, (request, tokens) in enumerate(waiting.items()):
                turns.setdefault(request, {})[number] = turn
                needs.setdefault(request, {})[number] = self._pool_of(number).blocks_for(tokens)
        held = {
            request: {number: self._pool_of(number).held_blocks(lease.request) for number, lease in leases.items()}
            for request, leases in self._leases.items()
        }
        outside = [
            KvClaim(name, held.get(name, {}), needs.get(name, {}), turns.get(name, {})) for name in {**held, **needs}
        ]
        found = gives_way([*residents(), *outside], lambda number: self._pool_of(number).n_blocks)
        self._taken = found is not None
        return None if found is None else found[0]

    # -- ends ---------------------------------------------------------------------------------------------------------

    def release(self, request: str, but: Container[int] = ()) -> None:
        """Free all blocks of a request, but for those on some instances, and withdraw what it waits for."""
        kept = {}
        for number, lease in self._leases.pop(request, {}).items():
            if number in but:
                kept[number] = lease
                continue
            self._pool_of(number).free(lease)
            self._holders[number].discard(request)
            self._freed(number)
        if kept:
            self._leases[request] = kept
        self._admission.forget(request)
        if self._waits.pop(request, 0):
            for waiting in self._waiting.values():
                waiting.pop(request, None)

    def settle(self, request: str, group: tuple[int, ...], tokens: int) -> None:
        """Note that a request has entered the scheduler of a group. Of one instance the scheduler itself leases blocks;
        of several each keeps blocks for its part of `tokens`, the KV with all of the output."""
        several = group if len(group) > 1 else ()
        self.release(request, but=several)
        self.spread(request, several, tokens)

    def spread(self, request: str, group: Iterable[int], tokens: int) -> None:
        """Keep the KV of a request that has left the scheduler of a group."""
        chosen = tuple(group)
        for number in chosen:
            self.hold(request, number, -(-tokens // len(chosen)))


def _name(request: str) -> str:
    # Not the request's own: its scheduler leases under that.
    return f"{request} outside"


# Prefix caches of a simulated cluster: what each instance has of a prompt, and copies between instances.
#
# A scheduler's prompts are cached where they were prefilled, and where they decode. KV of spans is cached where the
# request decodes. What the engine of a group of instances has cached is used by that group's later requests only.


class SimulatedPrefixCopies:
    """Look-ups over all engines of a cluster, and cached prefixes on their way from one to another."""

    def __init__(
        self,
        engines: Mapping[tuple[int, ...], SimulatedInstance],
        instances: int,
        arrives: Callable[[float, SimulatedInstance, str], None],
        changed: Callable[[SimulatedInstance], None],
    ) -> None:
        """engines: by their groups. arrives: schedules `arrived` for a time. changed: lets an engine start a batch."""
        self._engines, self._instances = engines, instances
        self._arrives, self._changed = arrives, changed
        self._queried_tokens = self._hit_tokens = 0

    def cached_tokens(self, source: TraceRequest) -> tuple[int, ...]:
        """Return how many tokens of a prompt each instance has cached; empty where none has any."""
        hits = [0] * self._instances
        for group, engine in self._engines.items():
            if engine.replica.prefixes is not None and len(group) == 1:
                hits[group[0]] = engine.replica.prefixes.cached_tokens(source)
        return tuple(hits) if any(hits) else ()

    def begin(self, target: SimulatedInstance, prefix: CachedPrefix | None, source: TraceRequest, now: float) -> int:
        """Begin to copy a prefix of a request that enters a scheduler. Return the tokens that come; 0: none.

        What its holder has evicted since the decision is not copied."""
        holder = None if prefix is None else self._engines.get((prefix.instance,))
        if prefix is None or holder is None or holder.replica.prefixes is None or target.replica.prefixes is None:
            return 0
        tokens = min(prefix.tokens, holder.replica.prefixes.cached_tokens(source))
        if holder is target or tokens <= target.replica.prefixes.cached_tokens(source):
            return 0
        name = target.replica.prefixes.begin_copy(source, tokens)
        if name is None:
            return 0
        self._arrives(now + prefix.copy_s, target, name)
        return tokens

    def arrived(self, target: SimulatedInstance, name: str) -> None:
        """Cache a prefix that has arrived, for which requests wait."""
        assert target.replica.prefixes is not None
        target.replica.prefixes.end_copy(name)
        self._changed(target)

    def count_span(self, entry: SpanEntry) -> None:
        """Count the look-up of a prompt that is computed in spans, with its first one."""
        if entry.index == 0:
            self._queried_tokens += entry.span.request.prompt_tokens
            self._hit_tokens += entry.span.start

    def use_of_spans(self, engines: Iterable[SimulatedInstance]) -> PrefixCacheUse | None:
        """Return the counters of prompts in spans; None where no engine has a prefix cache."""
        if all(engine.replica.prefixes is None for engine in engines):
            return None
        return PrefixCacheUse(self._queried_tokens, self._hit_tokens, 0)


def count_work(work: SpanWork, spec: ClusterSpec, span: Span, share: float) -> None:
    """Add a share of one span's work."""
    rows, size = span.end - span.start, len(span.group)
    pieces = math.ceil(rows / (size * spec.rows)) if spec.rows else 1
    work.tokens += share * rows
    # Row r of the prompt attends to r + 1 tokens.
    work.attention_pairs += share * rows * (span.start + span.end + 1) / 2
    # Each instance of the group reads what its rows attend to; a piece attends to all up to its own end.
    work.kv_read_tokens += share * size * (pieces * span.start + rows * (pieces + 1) / 2)
    work.passes += share * size * pieces


class SimulatedSpan:
    """The simulator's state of a queue entry."""

    __slots__ = ("began_s", "deferred", "due_s", "factor", "serial")

    def __init__(self, factor: float) -> None:
        self.factor = factor
        """Simulated time over predicted time (noise)."""
        self.began_s = -1.0
        """Start of its current stretch, virtual seconds; a pause ends a stretch."""
        self.due_s = math.inf
        """Virtual seconds at which it ends or pauses."""
        self.serial = 0
        """Number of starts, pauses and stops so far: scheduled ends that carry another number are stale."""
        self.deferred: list[KvSlice] = []
        """KV slices that are sent at the end of this span."""

    def computed_share(self, entry: SpanEntry, now: float) -> float:
        """Return the share of the span that its present stretch has computed by now."""
        whole_s = entry.predicted_s * self.factor
        return max(0.0, (now - self.began_s - entry.extra_s) / whole_s) if whole_s > 0 else 1.0

    def next_pause(self, entry: SpanEntry, now: float, points: PausePoints) -> tuple[float, int, int]:
        """Return (time, first token of the piece, layer) of the next pause point after `now`."""
        whole_s, begun = entry.predicted_s * self.factor, self.began_s + entry.extra_s
        # nothing is computed yet in this stretch: pause where it would begin
        if whole_s <= 0 or now <= begun:
            return max(now, begun), entry.tokens, entry.layer
        after_s, tokens, layer = points.next_point(entry.tokens, entry.layer, now - begun, whole_s)
        return min(self.due_s, begun + after_s), tokens, layer


def pause_points(spec: ClusterSpec, span: Span, nodes: int) -> PausePoints:
    """Return the pause points of a span on a group that spreads over `nodes` nodes."""
    shape = GroupShape(len(span.group), nodes, span.strategy)
    return pause_points_of(spec.spans, span.start, span.end, shape, spec.rows, spec.shape.layers)


def predicted_s(spec: ClusterSpec, spans: Sequence[Span], nodes: int, before: tuple[int, ...]) -> float:
    """Return the seconds of a span on its group, or of the spans of several requests as one batch.

    A single span also pays for what balancing the KV of earlier spans (on `before`) over its group exposes.
    """
    first = spans[0]
    shape = GroupShape(len(first.group), nodes, first.strategy)
    if len(spans) > 1:
        return batch_s(spec.spans, ((span.start, span.end - span.start) for span in spans), shape)
    alone_s = spec.spans.prefill_s(first.start, first.end - first.start, shape)
    if not spec.balance or not before:
        return alone_s
    # the slowest link of the group carries the balancing
    link = spec.links.inside if nodes == 1 else spec.links.across
    return alone_s + exposed_s(spec.shape, link, first.start, len(before), len(first.group), alone_s)


FOREVER = float("inf")


class SimulatedTransfers:
    """Slices of KV under way between instances."""

    def __init__(self, spec: ClusterSpec, state: ClusterState, arrives: Callable[[float, KvSlice], None]) -> None:
        """arrives: schedules the arrival of a slice at a time."""
        self._spec, self._state, self._arrives = spec, state, arrives

    def send(self, kv_slice: KvSlice, now: float) -> None:
        """Schedule the arrival of a KV slice; one sent while its span computes arrives after the span's last layer.

        The network cards of an instance's accelerators send together.
        """
        shape, instances = self._spec.shape, self._state.instances
        link = self._spec.links.between(instances[kv_slice.source], instances[kv_slice.target])
        count = (kv_slice.end - kv_slice.start) * shape.kv_bytes_per_token
        # All layers but the last were sent while the span computed.
        if kv_slice.overlapped and self._spec.sends_layers:
            count //= shape.layers
        send_s = kv_slice.backend_state = link.transfer_s(int(count / kv_slice.share / instances[kv_slice.source].tp))
        entry, computed_s = kv_slice.entry, now
        # The last layer (1 / layers of the slice) can be sent only when its span ends.
        if entry is not None and entry.state != "done" and entry.backend_state.due_s < FOREVER:
            computed_s = entry.backend_state.due_s
        self._arrives(max(now + send_s, computed_s + send_s / max(1, shape.layers)), kv_slice)

    def defer(self, kv_slice: KvSlice) -> bool:
        """Return whether a slice must wait for the end of the span that computes it, which was paused meanwhile.

        It is then sent on by `send_deferred`.
        """
        entry = kv_slice.entry
        if entry is None or entry.state == "done" or entry.controlled.ended:
            return False
        entry.backend_state.deferred.append(kv_slice)
        return True

    def send_deferred(self, entry: SpanEntry, now: float) -> None:
        """Schedule the arrival of slices that waited for the end of their span; only the last layer is unsent."""
        run: SimulatedSpan = entry.backend_state
        for kv_slice in run.deferred:
            self._arrives(now + kv_slice.backend_state / self._spec.shape.layers, kv_slice)
        run.deferred = []


class SimulatedBackend(InstanceBackend):
    """The backend of one `ClusterSimulation`: starting a span, batch or transfer schedules its end event."""

    def __init__(self, simulation: ClusterSimulation) -> None:
        self.simulation, self.spec = simulation, simulation.spec
        self.capabilities = simulation.spec.capabilities
        self.engines: dict[tuple[int, ...], SimulatedInstance] = {}
        self.noise = NoiseSource(
            simulation.run_spec.noise, f"noise {simulation.run_spec.seed} spans", self.spec.serving.spread
        )
        self.spans = self.chunked = 0
        self.work = SpanWork()
        self.busy = InstanceBusyTime(len(simulation.spec.instances))
        self.transfers = SimulatedTransfers(
            simulation.spec,
            simulation.state,
            lambda at_s, kv_slice: simulation.schedule(at_s, EventKind.KV_SENT, kv_slice),
        )
        self.prefix_copies = SimulatedPrefixCopies(
            self.engines,
            len(simulation.spec.instances),
            lambda at_s, *copy: simulation.schedule(at_s, EventKind.PREFIX_COPIED, copy),
            self.on_batch_end,
        )
        self._on: list[list[SimulatedInstance]] = [[] for _ in simulation.spec.instances]
        # engines, by index, that may start a batch at the end of this instant
        self._due: dict[int, SimulatedInstance] = {}
        # None: KV outside of schedulers takes no blocks, and nothing waits for it
        self.kv: SimulatedKvRoom | None = None
        if simulation.spec.kv_reservations:
            self.kv = SimulatedKvRoom(lambda i: _pool(self._engine((i,))), self._freed, self._granted)
        # start of the current hold of an instance, and of the current pause of a request's span; for Gantt bars
        self._held_s: dict[int, float] = {}
        self._paused_s: dict[str, float] = {}

    # -- predictions --------------------------------------------------------------------------------------------------

    def span_s(self, spans: Sequence[Span], nodes: int, before: tuple[int, ...]) -> float:
        return predicted_s(self.spec, spans, nodes, before)

    def prefill_estimate(self, request: Request, group: tuple[int, ...]) -> tuple[int, float]:
        return self._engine(group).work(request)

    def busy_s(self, group: tuple[int, ...]) -> float:
        at_s = 0.0
        for i in group:
            for engine in self._on[i]:
                if engine.free_at_s > at_s:
                    at_s = engine.free_at_s
        return at_s

    def refresh(self, instance: int) -> SchedulerStats:
        engines = self._on[instance]
        if not engines:
            return IDLE
        free_s, queued, used, running = 0.0, 0.0, 0, 0
        for engine in engines:
            # an engine on a group of n instances counts 1/n for each of them
            share = len(engine.group)
            if engine.free_at_s > free_s:
                free_s = engine.free_at_s
            queued += engine.queued_tokens / share
            # a group's KV takes blocks of its members' pools (`SimulatedKvRoom.settle`)
            if share == 1 or self.kv is None:
                used += engine.replica.used_tokens // share
            running += len(engine.resident)
        # no span occupies the instance, so a scheduler that was stopped for one may go on
        if not self.simulation.controller.queues.running[instance]:
            for engine in engines:
                self._due.setdefault(engine.index, engine)
        return SchedulerStats(free_s, queued, used, running)

    def fits(self, entry: SpanEntry) -> bool:
        return self.kv is None or self.kv.fits(entry)

    # -- spans --------------------------------------------------------------------------------------------------------

    def committed(self, entry: SpanEntry, now: float) -> None:
        # the second span of a request (index 1) makes it a chunked one
        self.chunked += entry.index == 1
        # one factor for the span; requests that are batched with it take as long
        factor = self.noise.factor(entry.predicted_s)
        for member in (entry, *entry.batched_with):
            member.backend_state = SimulatedSpan(factor)
            self.prefix_copies.count_span(member)

    def begin(self, entry: SpanEntry, now: float) -> None:
        run: SimulatedSpan = entry.backend_state
        since = self._paused_s.pop(entry.owner, now)
        # a span that resumes closes the bar of its pause
        for i in entry.group:
            self.simulation.bar("pause", i, since, entry.owner)
        self.busy.begin(entry.group, now)
        if self.kv is not None:
            self.kv.begin(entry)
        # a new serial number makes an end that was scheduled before a pause stale
        run.serial += 1
        # only the layers that are left count; `extra_s`, the time to restore its state, is without noise
        due_s = (
            now + entry.extra_s + entry.predicted_s * run.factor * (1.0 - entry.elapsed_share(self.spec.shape.layers))
        )
        for member in (entry, *entry.batched_with):
            member.backend_state.began_s, member.backend_state.due_s = now, due_s
            request: SimRequest = member.controlled.backend_state
            # a request is scheduled with its first span; resuming does not change that
            if request.scheduled_s is None:
                request.scheduled_s, request.cached_tokens = now, member.span.start
        self.spans += 1
        self.simulation.schedule(due_s, EventKind.SPAN_END, ("done", entry, run.serial))

    def pause(self, entry: SpanEntry, now: float) -> None:
        run: SimulatedSpan = entry.backend_state
        nodes = len({self.spec.instances[i].node for i in entry.group})
        points = pause_points(self.spec, entry.span, nodes)
        at_s, tokens, layer = run.next_pause(entry, now, points)
        # the next pause point is the end: there is nothing left to preempt
        if at_s >= run.due_s:
            raise ActionImpossible(f"{entry.owner} is in its last layer")
        run.serial += 1
        run.due_s = at_s
        self.simulation.schedule(at_s, EventKind.SPAN_END, ("pause", entry, run.serial, points, tokens, layer))

    def stop(self, entry: SpanEntry, now: float) -> None:
        entry.backend_state.serial += 1
        self.busy.end(entry.group, now)

    def paused(self, entry: SpanEntry, now: float) -> None:
        """Record the start of a pause: a span has stopped at the edge of a layer."""
        self._paused_s[entry.owner] = now

    # -- schedulers ---------------------------------------------------------------------------------------------------

    def _engine(self, group: tuple[int, ...]) -> SimulatedInstance:
        engine = self.engines.get(group)
        if engine is None:
            simulation, index = self.simulation, len(self.engines)
            spec = self.spec.engine([simulation.state.instances[i] for i in group])
            run = simulation.run_spec
            noise = NoiseSource(run.noise, f"noise {run.seed} {group}", spec.serving.spread)
            # repeated decodes are cut short by `end_repeats`, which handles engines of one stage and KV group only
            fast = simulation.run_spec.fast_forward and spec.config.stages == spec.config.kv_parallel == 1
            replica: SimulatedEngine | SimulatedVllm
            if spec.vllm is not None:
                replica = SimulatedVllm(index, spec, spec.vllm, noise, None)
            else:
                replica = SimulatedEngine(index, spec, noise, fast, None)
            engine = self.engines[group] = SimulatedInstance(index, group, replica)
            for i in group:
                self._on[i].append(engine)
        return engine

    def _end_repeats(self, engine: SimulatedInstance, now: float) -> None:
        """End repeated decodes with the step under way: a request is about to be added or removed."""
        again = engine.replica.end_repeats(now)
        if again is not None:
            self.simulation.schedule(again[0], EventKind.BATCH_END, (engine, again[1]))

    def enter(self, controlled: ControlledRequest, group: tuple[int, ...], phase: Phase, now: float) -> None:
        engine, request = self._engine(group), controlled.backend_state
        # the scheduler may take the new request into the next iteration: it must not be one of merged ones; nor may
        # those of engines that are fused with this one's
        for sharing in {each.index: each for i in group for each in self._on[i]}.values():
            self._end_repeats(sharing, now)
        track = request.track_for(phase)
        engine.add(track, now, self.prefix_copies.begin(engine, controlled.prefix, request.source, now))
        if self.kv is not None:
            self.kv.settle(controlled.request.id, group, request.kv_tokens + request.missing_tokens)
        request.track = track
        self._due[engine.index] = engine

    def leave(self, controlled: ControlledRequest, why: str, now: float) -> int:
        engine, request = self._engine(controlled.group), controlled.backend_state
        self._end_repeats(engine, now)
        engine.drop(controlled.request.id, now, why)
        self._due[engine.index] = engine
        request.take_tokens(request.track)
        if self.kv is not None and why == "moved":
            self.kv.spread(controlled.request.id, controlled.group, request.kv_tokens)
        return len(request.times)

    def on_batch_end(self, engine: SimulatedInstance) -> None:
        """Let an engine start its next batch at the end of this instant."""
        self._due[engine.index] = engine

    def pump(self, now: float) -> None:
        """Start batches on all engines with an event at this instant, in order of creation; decodes that batches of
        other engines take along come last."""
        sharing = {index: _sharing(engine, self._on) for index, engine in self._due.items()}
        for index in sorted(self._due, key=lambda i: (bool(sharing[i]) and not self._due[i].queued_tokens, i)):
            engine = self._due[index]
            # No instance of its group may run a span that excludes batches.
            running = (self.simulation.controller.queues.running[i] for i in engine.group)
            if all(run is None or run.concurrent for run in running):
                # decodes repeat up to the window's end: `_end_repeats` cuts them short at any arrival
                others, replica = sharing[index], engine.replica
                replica.fused_s, replica.fused_until_s = self._fused(engine, others)
                for at_s, batch in replica.start_batches(now, now if others else self.simulation.end_s):
                    if batch >= 0:
                        self.busy.begin(engine.group, now)
                    self.simulation.batch_begun(engine, at_s, batch)
        self._due.clear()

    def _fused(self, engine: SimulatedInstance, others: list[SimulatedInstance]) -> tuple[float, float]:
        """Return what a batch of `engine` shares with engines on its instances, as one fused batch (PecSched Fig. 7).

        (seconds of attention that their decodes add to it; end of the batch that takes its own decodes along, or 0.0.)
        A decode adds no linear layers to speak of. It gets its token at the end of the prefill's iteration."""
        fused_s = 0.0
        for other in others:
            if not other.queued_tokens:
                # KV outside of its scheduler, such as its part of a group's, is not read by its decodes
                outside = self.kv.outside(other.group[0]) if self.kv is not None and len(other.group) == 1 else 0
                used = other.replica.used_tokens - outside
                fused_s += other.replica.latency.decode_s(len(other.resident), used)
        if engine.queued_tokens:
            return fused_s, 0.0
        return fused_s, max((other.replica.busy_until_s() for other in others if other.queued_tokens), default=0.0)

    # -- transfers ----------------------------------------------------------------------------------------------------

    def announced(self, controlled: ControlledRequest, target: int, now: float) -> None:
        if self.kv is not None:
            self.kv.announce(controlled.request.id, target, controlled.backend_state.kv_tokens)

    def claims(self) -> Iterator[KvClaim]:
        """Yield the claims of the requests in the schedulers of single instances, in blocks."""
        for engine in self.engines.values():
            if len(engine.group) == 1:
                pool, at = _pool(engine), engine.group[0]
                for name, track in engine.resident.items():
                    has = pool.held_blocks(track.request.id)
                    tokens = track.request.prompt_tokens + track.left
                    yield KvClaim(name, {at: has}, {at: pool.blocks_for(tokens) - has}, {}, resident=True)

    def ready(self, kv_slice: KvSlice) -> bool:
        return self.kv is None or self.kv.ready(kv_slice)

    def send(self, kv_slice: KvSlice, now: float) -> None:
        self.transfers.send(kv_slice, now)

    # -- ends ---------------------------------------------------------------------------------------------------------

    def forget(self, controlled: ControlledRequest, why: str | None, now: float) -> bool:
        for entry in controlled.entries:
            self.transfers.send_deferred(entry, now)
        self._paused_s.pop(controlled.request.id, None)
        if self.kv is not None:
            self.kv.release(controlled.request.id)
        request: SimRequest = controlled.backend_state
        request.ended_s, request.error, request.rejected = now, why, controlled.rejected
        self.simulation.schedule_next_turn(request.source)
        return False

    def _granted(self, request: str, target: int) -> None:
        self.simulation.controller.state.transfers.unpark(request, target)

    def _freed(self, instance: int) -> None:
        """Let spans and schedulers that wait for blocks of an instance try again."""
        self.simulation.controller.state.touch((instance,))
        for engine in self._on[instance]:
            self._due.setdefault(engine.index, engine)

    def held(self, holder: str, group: tuple[int, ...], now: float) -> None:
        for i in group:
            self._held_s[i] = now

    def released(self, holder: str, instances: Iterable[int], now: float) -> None:
        for i in instances:
            self.simulation.bar("hold", i, self._held_s.pop(i, now), holder)


def _pool(engine: SimulatedInstance) -> BlockManager:
    """Return the KV blocks of an instance of Headway's own."""
    assert isinstance(engine.replica, SimulatedEngine)
    return engine.replica.block_manager


def _sharing(engine: SimulatedInstance, on: Sequence[list[SimulatedInstance]]) -> list[SimulatedInstance]:
    """Return the other engines with work on an engine's instances: their iterations are fused with its own.

    on: the engines of each instance."""
    if all(len(on[i]) == 1 for i in engine.group):
        return []
    others = {each.index: each for i in engine.group for each in on[i] if each is not engine}
    return [each for each in others.values() if each.resident]


IDLE = SchedulerStats()
