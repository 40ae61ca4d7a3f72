"""The controller's backend in virtual time: spans take predicted times with noise; instance schedulers are real."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from headway.control.backend import ActionImpossible, InstanceBackend, SchedulerStats
from headway.control.controlled_request import ControlledRequest
from headway.control.kv_reservations import KvClaim
from headway.control.queue_entries import SpanEntry
from headway.control.transfer_queue import KvSlice
from headway.core.request import Request
from headway.core.span import Phase, Span
from headway.sim.cluster.busy_time import InstanceBusyTime
from headway.sim.cluster.instance import SimulatedInstance
from headway.sim.cluster.kv_room import SimulatedKvRoom
from headway.sim.cluster.prefix_copies import SimulatedPrefixCopies
from headway.sim.cluster.simulated_request import SimRequest
from headway.sim.cluster.spans import SimulatedSpan, pause_points, predicted_s
from headway.sim.cluster.transfers import SimulatedTransfers
from headway.sim.event_loop import EventKind
from headway.sim.noise import NoiseSource
from headway.sim.replica import SimulatedEngine
from headway.sim.result import SpanWork

if TYPE_CHECKING:
    from headway.sim.cluster.simulation import ClusterSimulation


class SimulatedBackend(InstanceBackend):
    """The backend of one `ClusterSimulation`: starting a span, batch or transfer schedules its end event."""

    def __init__(self, simulation: ClusterSimulation) -> None:
        self.simulation, self.spec = simulation, simulation.spec
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
            self.kv = SimulatedKvRoom(lambda i: self._engine((i,)).replica.block_manager, self._freed, self._granted)
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
            used += engine.replica.block_manager.used_tokens // share
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
            # repeated decodes are cut short by `end_repeats`, which handles engines of one stage only
            fast = simulation.run_spec.fast_forward and spec.config.stages == 1
            engine = self.engines[group] = SimulatedInstance(
                index, group, SimulatedEngine(index, spec, noise, fast, None)
            )
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
            # what a transfer has brought is leased by the scheduler from now on
            self.kv.release(controlled.request.id)
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
                replica.fused_s, replica.fused_until_s = _fused(engine, others)
                for at_s, batch in replica.start_batches(now, now if others else self.simulation.end_s):
                    if batch >= 0:
                        self.busy.begin(engine.group, now)
                    self.simulation.batch_begun(engine, at_s, batch)
        self._due.clear()

    # -- transfers ----------------------------------------------------------------------------------------------------

    def announced(self, controlled: ControlledRequest, target: int, now: float) -> None:
        if self.kv is not None:
            self.kv.announce(controlled.request.id, target, controlled.backend_state.kv_tokens)

    def claims(self) -> Iterator[KvClaim]:
        """Yield the claims of the requests in the schedulers of single instances, in blocks."""
        for engine in self.engines.values():
            if len(engine.group) == 1:
                pool, at = engine.replica.block_manager, engine.group[0]
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


def _sharing(engine: SimulatedInstance, on: Sequence[list[SimulatedInstance]]) -> list[SimulatedInstance]:
    """Return the other engines with work on an engine's instances: their iterations are fused with its own.

    on: the engines of each instance."""
    if all(len(on[i]) == 1 for i in engine.group):
        return []
    others = {each.index: each for i in engine.group for each in on[i] if each is not engine}
    return [each for each in others.values() if each.resident]


def _fused(engine: SimulatedInstance, others: list[SimulatedInstance]) -> tuple[float, float]:
    """Return what a batch of `engine` shares with engines on its instances, as one fused batch (PecSched Fig. 7).

    (seconds of attention that their decodes add to it; end of the batch that takes its own decodes along, or 0.0.) A
    decode adds no linear layers to speak of. It gets its token at the end of the prefill's iteration."""
    fused_s = 0.0
    for other in others:
        if not other.queued_tokens:
            fused_s += other.replica.latency.decode_s(len(other.resident), other.replica.block_manager.used_tokens)
    if engine.queued_tokens:
        return fused_s, 0.0
    return fused_s, max((other.replica.busy_until_s() for other in others if other.queued_tokens), default=0.0)


IDLE = SchedulerStats()
