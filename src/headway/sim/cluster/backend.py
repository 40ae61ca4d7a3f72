"""A machine's hands over virtual time: spans take what is predicted (and noise), schedulers are the real ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from headway.control.backend import ActionImpossible, InstanceBackend, SchedulerStats
from headway.control.queue_entries import SpanEntry
from headway.control.request import ControlledRequest
from headway.control.transfer_queue import KvSlice
from headway.core.request import Request
from headway.core.span import Phase, Span
from headway.sim.cluster.instance import SimulatedInstance
from headway.sim.cluster.request import SimRequest
from headway.sim.cluster.spans import SimulatedSpan, edges, predicted_s
from headway.sim.event_loop import EventKind
from headway.sim.noise import NoiseSource
from headway.sim.replica import SimulatedEngine

if TYPE_CHECKING:
    from headway.sim.cluster.simulation import ClusterSimulation

FOREVER = float("inf")


class SimulatedBackend(InstanceBackend):
    """Of one `ClusterSimulation`: what begins here comes back on its heap."""

    def __init__(self, simulation: ClusterSimulation) -> None:
        self.simulation, self.spec = simulation, simulation.spec
        count = len(simulation.spec.instances)
        self.engines: dict[tuple[int, ...], SimulatedInstance] = {}
        self.noise = NoiseSource(simulation.run_spec.noise, f"noise {simulation.run_spec.seed} spans")
        self.spans = self.chunked = 0
        self.busy_for_s = [0.0] * count
        self._on: list[list[SimulatedInstance]] = [[] for _ in range(count)]
        self._due: dict[int, SimulatedInstance] = {}
        self._active = [0] * count
        self._since = [0.0] * count
        self._held_s: dict[int, float] = {}
        self._paused_s: dict[str, float] = {}

    # -- what it expects ----------------------------------------------------------------------------------------------

    def span_s(self, spans: Sequence[Span], nodes: int, before: tuple[int, ...]) -> float:
        return predicted_s(self.spec, spans, nodes, before)

    def stay_s(self, request: Request, group: tuple[int, ...]) -> tuple[int, float]:
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
            return NOTHING
        free_s, queued, used, running = 0.0, 0.0, 0, 0
        for engine in engines:
            share = len(engine.group)
            if engine.free_at_s > free_s:
                free_s = engine.free_at_s
            queued += engine.queued / share
            used += engine.replica.ledger.used_tokens // share
            running += len(engine.stays)
        if not self.simulation.controller.lanes.running[instance]:
            for engine in engines:
                self._due.setdefault(engine.index, engine)
        return SchedulerStats(free_s, queued, used, running)

    # -- spans --------------------------------------------------------------------------------------------------------

    def committed(self, entry: SpanEntry, now: float) -> None:
        self.chunked += entry.index == 1
        factor = self.noise.factor()
        for member in (entry, *entry.along):
            member.driver = SimulatedSpan(factor)

    def begin(self, entry: SpanEntry, now: float) -> None:
        run: SimulatedSpan = entry.driver
        since = self._paused_s.pop(entry.owner, now)
        for i in entry.group:
            self.simulation.bar("pause", i, since, entry.owner)
        self.occupy(entry.group, 1)
        run.serial += 1
        due_s = now + entry.extra_s + entry.predicted_s * run.factor * (1.0 - entry.over(self.spec.shape.layers))
        for member in (entry, *entry.along):
            member.driver.began_s, member.driver.due_s = now, due_s
            trip: SimRequest = member.journey.driver
            if trip.scheduled_s is None:
                trip.scheduled_s = now
        self.spans += 1
        self.simulation.schedule(due_s, EventKind.SPAN_END, ("done", entry, run.serial))

    def pause(self, entry: SpanEntry, now: float) -> None:
        run: SimulatedSpan = entry.driver
        nodes = len({self.spec.instances[i].node for i in entry.group})
        at = edges(self.spec, entry.span, nodes)
        at_s, tokens, layer = run.pause_at(entry, now, at)
        if at_s >= run.due_s:
            raise ActionImpossible(f"{entry.owner} is in its last layer")
        run.serial += 1
        run.due_s = at_s
        self.simulation.schedule(at_s, EventKind.SPAN_END, ("pause", entry, run.serial, at, tokens, layer))

    def stop(self, entry: SpanEntry, now: float) -> None:
        entry.driver.serial += 1
        self.occupy(entry.group, -1)

    def paused(self, entry: SpanEntry, now: float) -> None:
        """A span has stopped at a layer edge."""
        self._paused_s[entry.owner] = now

    # -- schedulers ---------------------------------------------------------------------------------------------------

    def _engine(self, group: tuple[int, ...]) -> SimulatedInstance:
        engine = self.engines.get(group)
        if engine is None:
            simulation, index = self.simulation, len(self.engines)
            spec = self.spec.engine([simulation.state.instances[i] for i in group])
            noise = NoiseSource(simulation.run_spec.noise, f"noise {simulation.run_spec.seed} {group}")
            fast = simulation.run_spec.fast_forward and spec.config.stages == 1
            engine = self.engines[group] = SimulatedInstance(
                index, group, SimulatedEngine(index, spec, noise, fast, None)
            )
            for i in group:
                self._on[i].append(engine)
        return engine

    def _cut(self, engine: SimulatedInstance, now: float) -> None:
        """Somebody comes or leaves: decodes that were repeated end with the step that is under way."""
        again = engine.replica.cut(now)
        if again is not None:
            self.simulation.schedule(again[0], EventKind.BATCH_END, (engine, again[1]))

    def enter(self, journey: ControlledRequest, group: tuple[int, ...], phase: Phase, now: float) -> None:
        engine, trip = self._engine(group), journey.driver
        self._cut(engine, now)
        track = trip.stay(phase)
        engine.add(track, now)
        trip.track = track
        self._due[engine.index] = engine

    def leave(self, journey: ControlledRequest, why: str, now: float) -> int:
        engine, trip = self._engine(journey.group), journey.driver
        self._cut(engine, now)
        engine.drop(journey.request.id, now, why)
        self._due[engine.index] = engine
        trip.take(trip.track)
        return len(trip.times)

    def stepped(self, engine: SimulatedInstance) -> None:
        """An iteration has ended there."""
        self._due[engine.index] = engine

    def pump(self, now: float) -> None:
        """Begin batches."""
        for index in sorted(self._due):
            engine = self._due[index]
            if self._may_run(engine):
                for at_s, batch in engine.replica.pump(now, self.simulation.end_s):
                    if batch >= 0:
                        self.occupy(engine.group, 1)
                    self.simulation.batch_begun(engine, at_s, batch)
        self._due.clear()

    def _may_run(self, engine: SimulatedInstance) -> bool:
        """A span that runs alone on one of its instances stops a scheduler at its next iteration."""
        running = self.simulation.controller.lanes.running
        return all((run := running[i]) is None or run.beside for i in engine.group)

    # -- transfers ----------------------------------------------------------------------------------------------------

    def send(self, piece: KvSlice, now: float) -> None:
        """What is sent while it is computed cannot be there before its last layer is. The accelerators' cards of an
        instance send together."""
        shape, instances = self.spec.shape, self.simulation.state.instances
        link = self.spec.links.between(instances[piece.source], instances[piece.target])
        count = (piece.end - piece.start) * shape.kv_bytes_per_token
        if piece.overlapped:
            count //= shape.layers
        send_s = piece.driver = link.transfer_s(int(count / piece.share / instances[piece.source].tp))
        entry, computed_s = piece.entry, now
        if entry is not None and entry.state != "done" and entry.driver.due_s < FOREVER:
            computed_s = entry.driver.due_s
        self.simulation.schedule(
            max(now + send_s, computed_s + send_s / max(1, shape.layers)), EventKind.KV_SENT, piece
        )

    def too_early(self, piece: KvSlice) -> bool:
        """Whether a piece has to wait for the end of the span that computes it (which was paused): it will be sent on
        then."""
        entry = piece.entry
        if entry is None or entry.state == "done" or entry.journey.ended:
            return False
        entry.driver.late.append(piece)
        return True

    def send_late(self, entry: SpanEntry, now: float) -> None:
        """What has waited for a span's end goes on."""
        run: SimulatedSpan = entry.driver
        for piece in run.late:
            self.simulation.schedule(now + piece.driver / self.spec.shape.layers, EventKind.KV_SENT, piece)
        run.late = []

    # -- ends ---------------------------------------------------------------------------------------------------------

    def forget(self, journey: ControlledRequest, why: str | None, now: float) -> None:
        for entry in journey.entries:
            self.send_late(entry, now)
        self._paused_s.pop(journey.request.id, None)
        trip: SimRequest = journey.driver
        trip.ended_s, trip.error, trip.rejected = now, why, journey.rejected

    def held(self, holder: str, group: tuple[int, ...], now: float) -> None:
        for i in group:
            self._held_s[i] = now

    def released(self, holder: str, instances: Iterable[int], now: float) -> None:
        for i in instances:
            self.simulation.bar("hold", i, self._held_s.pop(i, now), holder)

    def occupy(self, group: Iterable[int], change: int) -> None:
        """Something begins (+1) or ends (-1) to compute on these instances; overlaps are busy once."""
        now = self.simulation.now
        for i in group:
            was, self._active[i] = self._active[i], self._active[i] + change
            if not was:
                self._since[i] = now
            elif not self._active[i]:
                self.busy_for_s[i] += now - self._since[i]

    def settle_busy(self) -> None:
        """Count what is still going on up to now."""
        for i, active in enumerate(self._active):
            if active:
                self.busy_for_s[i] += self.simulation.now - self._since[i]
                self._since[i] = self.simulation.now


NOTHING = SchedulerStats()
