"""Carrying out what a policy wants: on lanes, schedulers and links. Each action is done whole or refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from headway.core.errors import RequestError
from headway.placement.base import (
    Action,
    Commit,
    Enqueue,
    Held,
    Hold,
    Paused,
    Phase,
    Preempt,
    Prefilled,
    Progress,
    Refused,
    Reject,
    Release,
    Resume,
    Transfer,
)
from headway.simulator.cluster.engine import Engine
from headway.simulator.cluster.journey import Journey
from headway.simulator.cluster.lanes import Entry, Lanes
from headway.simulator.cluster.spans import SpanRun, predicted_batch_s, predicted_s
from headway.simulator.cluster.timeline import Timeline
from headway.simulator.cluster.transfers import Piece, Transfers
from headway.simulator.cohorts import Track
from headway.simulator.noise import NoiseSource
from headway.simulator.replica import Replica

if TYPE_CHECKING:
    from headway.simulator.cluster.world import World

SPAN, STEP, SENT = 0, 1, 2
FOREVER = float("inf")


class Waiting(NamedTuple):
    """What stands in the lanes of a request on its way to a scheduler: its prompt's tokens, and seconds alone there."""

    phase: Phase
    tokens: int
    seconds: float


class Impossible(Exception):  # noqa: N818 - caught where it is raised for
    """An action cannot be carried out; says why."""


class Actions:
    """The hands of a `World`."""

    def __init__(self, world: World) -> None:
        self.world = world
        spec = world.spec
        self.lanes = Lanes(instance.node for instance in spec.instances)
        self.timeline = Timeline(self.lanes, self._left_s, self._busy_s)
        self.transfers = Transfers(spec.backends, spec.shape.layers, spec.handshake)
        self.load = [0] * len(spec.instances)
        self._on: list[list[Engine]] = [[] for _ in spec.instances]
        self._tokens = [0.0] * len(spec.instances)
        self._touched: set[int] = set()
        self._engines: dict[int, Engine] = {}
        self._stale: set[int] = set()
        self._late: dict[int, list[Piece]] = {}
        self._active: list[int] = [0] * len(spec.instances)
        self._since: list[float] = [0.0] * len(spec.instances)
        self._sends: dict[str, dict[int, int]] = {}
        self._held_s: dict[int, tuple[str, float]] = {}
        self._paused_s: dict[str, float] = {}
        self._verbs: dict[type, Callable[[Any], None]] = {
            Commit: self._commit,
            Hold: self._hold,
            Release: self._release,
            Enqueue: self._enqueue,
            Preempt: self._preempt,
            Resume: self._resume,
            Transfer: self._transfer,
            Reject: self._reject,
        }

    # -- the verbs ----------------------------------------------------------------------------------------------------

    def do(self, action: Action) -> None:
        """Carry out one action, or say that it was refused."""
        try:
            self._verbs[type(action)](action)
        except Impossible as why:
            self.world.refused += 1
            name = action.holder if isinstance(action, Hold | Release) else action.request
            self.world.news.append(Refused(name, type(action).__name__.lower(), str(why)))

    def _journey(self, name: str) -> Journey:
        journey = self.world.journeys.get(name)
        if journey is None or journey.ended_s is not None:
            raise Impossible(f"there is no request {name}")
        return journey

    def _group(self, group: Iterable[int]) -> tuple[int, ...]:
        chosen = self.lanes.ordered(group)
        for i in chosen:
            if not 0 <= i < len(self.load):
                raise Impossible(f"there is no instance {i}")
        if not chosen:
            raise Impossible("a group needs an instance")
        return chosen

    def _commit(self, action: Commit) -> None:
        if action.along:
            self._commit_batch(action)
            return
        journey = self._journey(action.request)
        groups = [self._group(span.group) for span in action.spans]
        self._check_fresh((i for group in groups for i in group), action.version)
        at = journey.entries[-1].payload.span.end if journey.entries else action.spans[0].start  # type: ignore[attr-defined]
        held = {i for i, holder in enumerate(self.lanes.holder) if holder == action.request}
        for span, group in zip(action.spans, groups, strict=True):
            if span.start != at or span.end <= span.start:
                raise Impossible(f"a span of tokens {span.start} to {span.end} does not go on from {at}")
            if held and not held.issuperset(group):
                raise Impossible("a holder's spans must lie on what it holds")
            at = span.end
        if at > journey.request.prompt_tokens:
            raise Impossible(f"the prompt has {journey.request.prompt_tokens} tokens, not {at}")
        before = journey.entries[-1] if journey.entries else None
        for span, group in zip(action.spans, groups, strict=True):
            index = len(journey.entries)
            nodes = len({self.lanes.nodes[i] for i in group})
            seconds = predicted_s(self.world.spec, self.world.spec.spans, span, nodes, before.group if before else ())
            run = SpanRun(span, index, span.end == journey.request.prompt_tokens, seconds, self.world.noise.factor())
            entry = Entry("span", action.request, group, run, before, action.beside)
            journey.entries.append(entry)
            self.lanes.append(entry)
            self.timeline.extend(entry, self.world.now)
            for i in group:
                self._tokens[i] += (span.end - span.start) / len(group)
            self._touch(group)
            before = entry
        self.world.chunked += len(journey.entries) > 1 and len(journey.entries) - len(action.spans) < 2

    def _check_fresh(self, instances: Iterable[int], version: int) -> None:
        for i in instances:
            if self.world.book.changed_at[i] > version:
                raise Impossible(f"instance {i} has changed since version {version}")

    def _commit_batch(self, action: Commit) -> None:
        """One entry on the lanes for all; each request has an entry of its own to be found by."""
        spans = (*action.spans, *action.along)
        journeys = [self._journey(span.request.id) for span in spans]
        group = self._group(spans[0].group)
        self._check_fresh(group, action.version)
        names = {journey.request.id for journey in journeys}
        if len(action.spans) != 1 or len(names) != len(spans) or spans[0].request.id != action.request:
            raise Impossible("a batch has one span of each of its requests, the first one's first")
        if any(self.lanes.holder[i] is not None for i in group):
            raise Impossible("a batch cannot run on instances that are held")
        for span, journey in zip(spans, journeys, strict=True):
            if self._group(span.group) != group or journey.entries:
                raise Impossible("a batch runs on one group, and its requests have no other spans")
            if not 0 <= span.start < span.end <= journey.request.prompt_tokens:
                raise Impossible(f"tokens {span.start} to {span.end} are not in {span.request.id}'s prompt")
        nodes = len({self.lanes.nodes[i] for i in group})
        seconds, factor = predicted_batch_s(self.world.spec, spans, nodes), self.world.noise.factor()
        lead: Entry | None = None
        for span, journey in zip(spans, journeys, strict=True):
            run = SpanRun(span, 0, span.end == journey.request.prompt_tokens, seconds, factor)
            entry = Entry("span", journey.request.id, group, run, None, action.beside)
            journey.entries.append(entry)
            if lead is None:
                lead = entry
                self.lanes.append(lead)
            else:
                entry.state, run.lead = "waiting", lead
                lead.payload.along.append(entry)  # type: ignore[attr-defined]
            for i in group:
                self._tokens[i] += (span.end - span.start) / len(group)
        assert lead is not None
        self.timeline.extend(lead, self.world.now)
        self._touch(group)

    def _hold(self, action: Hold) -> None:
        group = self._group(action.group)
        if any(holder == action.holder for holder in self.lanes.holder):
            taken = [i for i in group if not self.lanes.empty(i)]
            if taken:
                raise Impossible(f"{action.holder} holds a group already, and instance {taken[0]} is not free")
        self.lanes.append(Entry("hold", action.holder, group, None))
        self._touch(group)

    def _release(self, action: Release) -> None:
        for lane in self.lanes.waiting:
            for entry in [e for e in lane if e.kind == "hold" and e.owner == action.holder and not action.group]:
                self.lanes.park(entry)
                self._touch(entry.group)
        self._let_go(action.holder, action.group)

    def _let_go(self, holder: str, group: Iterable[int] = ()) -> None:
        freed = self.lanes.release(holder, group)
        for i in freed:
            _, since = self._held_s.pop(i, (holder, self.world.now))
            self.world.bar("hold", i, since, holder)
        self._touch(freed)

    def _enqueue(self, action: Enqueue) -> None:
        journey = self._journey(action.request)
        group = self._group(action.group)
        if journey.door is not None:
            raise Impossible(f"{action.request} waits for its turn already")
        self._unstay(journey)
        if not action.beside and any(self.lanes.blocked(i, action.request) for i in group):
            tokens, seconds = (1, 0.0) if action.phase == "decode" else self._engine(group).work(journey.request)
            journey.door = Entry("door", action.request, group, Waiting(action.phase, tokens, seconds))
            self.lanes.append(journey.door)
            self.timeline.extend(journey.door, self.world.now)
            self._count_door(journey.door, 1)
            return
        self._enter(journey, group, action.phase)

    def _count_door(self, door: Entry, change: int) -> None:
        """A request waits for its turn (+1), or no longer (-1)."""
        waiting: Waiting = door.payload  # type: ignore[assignment]
        for i in door.group:
            self._tokens[i] += change * waiting.tokens / len(door.group)
        self._touch(door.group)

    def _preempt(self, action: Preempt) -> None:
        journey = self._journey(action.request)
        entry = next((e for e in journey.entries if e.state == "running"), None)
        if entry is None and journey.track is not None and journey.phase == "decode":
            self._unstay(journey)
            at = Progress(journey.request.prompt_tokens + len(journey.times), 0)
            self.world.news.append(Paused(action.request, len(journey.entries) - 1, at))
            return
        if entry is None:
            raise Impossible(f"{action.request} does not run")
        run: SpanRun = entry.payload  # type: ignore[assignment]
        if run.along or run.lead is not None:
            raise Impossible(f"{action.request} is computed in a batch")
        at_s, layer = run.pause_at(self.world.now, self.world.spec.shape.layers)
        if at_s >= run.due_s:
            raise Impossible(f"{action.request} is in its last layer")
        run.serial += 1
        run.due_s = at_s
        self.world.push(at_s, SPAN, ("pause", entry, run.serial, layer))

    def _resume(self, action: Resume) -> None:
        journey = self._journey(action.request)
        parked = [e for e in journey.entries if e.state == "parked"]
        if not parked:
            raise Impossible(f"{action.request} is not paused")
        parked[0].payload.extra_s = action.lost_s  # type: ignore[attr-defined]
        for entry in reversed(parked):
            self.lanes.push(entry)
            self._touch(entry.group)
        self._anew()

    def _transfer(self, action: Transfer) -> None:
        journey = self._journey(action.request)
        self._group((action.to,))
        if action.index is not None:
            if not 0 <= action.index < len(journey.entries):
                raise Impossible(f"{action.request} has no span {action.index}")
            entry = journey.entries[action.index]
            if entry.state in ("running", "done"):
                self._announce(journey, entry, action.to, self.world.now)
            else:
                self._sends.setdefault(action.request, {})[action.index] = action.to
            return
        group = journey.group or (journey.entries[-1].group if journey.entries else ())
        if not group:
            raise Impossible(f"{action.request} has no KV anywhere")
        shape = self.world.spec.shape
        count = (journey.request.prompt_tokens + len(journey.times)) * shape.kv_bytes_per_token
        if action.overlapped:
            count //= shape.layers
        self.transfers.add(self._pieces(action.request, group, action.to, count), self.world.now)

    def _reject(self, action: Reject) -> None:
        self.world.drop(self._journey(action.request), f"rejected: {action.why}")

    # -- transfers ----------------------------------------------------------------------------------------------------

    def _announce(self, journey: Journey, entry: Entry, to: int, now: float) -> None:
        span = entry.payload.span  # type: ignore[attr-defined]
        count = (span.end - span.start) * self.world.spec.shape.kv_bytes_per_token
        self.transfers.add(self._pieces(entry.owner, entry.group, to, count, entry), now)

    def _pieces(
        self, request: str, group: tuple[int, ...], to: int, count: int, entry: Entry | None = None
    ) -> list[Piece]:
        """One piece a sending instance; its accelerators' cards send together."""
        instances, links = self.world.book.instances, self.world.spec.links
        pieces = []
        for i in group:
            link = links.between(instances[i], instances[to])
            send_s = link.transfer_s(int(count / len(group) / instances[i].tp))
            piece = Piece(request, i, to, send_s)
            piece.entry = entry
            pieces.append(piece)
        return pieces

    def _computed_s(self, piece: Piece) -> float:
        """When what a piece carries is computed: known for spans that run."""
        entry = piece.entry
        if entry is None or entry.state == "done":
            return self.world.now
        run: SpanRun = entry.payload
        return run.due_s if run.due_s < FOREVER else self.world.now

    def too_early(self, piece: Piece) -> bool:
        """Whether a piece has to wait for the end of the span that computes it (which was paused): it will be sent on
        then."""
        entry = piece.entry
        if entry is None or entry.state == "done" or self.world.journeys[piece.request].ended_s is not None:
            return False
        self._late.setdefault(id(entry), []).append(piece)
        return True

    def more_to_send(self, journey: Journey) -> bool:
        """Whether spans that have not begun will be transferred too."""
        return bool(self._sends.get(journey.request.id))

    # -- spans --------------------------------------------------------------------------------------------------------

    def _left_s(self, entry: Entry) -> float:
        if isinstance(entry.payload, Waiting):
            return entry.payload.seconds
        run: SpanRun = entry.payload  # type: ignore[assignment]
        return run.left_s(self.world.spec.shape.layers)

    def _busy_s(self, entry: Entry) -> float:
        """When the prefills are done that its instances' schedulers have, for which an entry waits."""
        if entry.beside:
            return 0.0
        return max((engine.free_at_s for i in entry.group for engine in self._on[i]), default=0.0)

    def begin(self) -> bool:
        """Start entries whose turn it is, in order of rank; True when any was."""
        began = False
        while self._touched:
            touched, self._touched = self._touched, set()
            for entry in self.lanes.candidates(sorted(touched)):
                if entry.state == "waiting" and self.lanes.ready(entry) and self._clear(entry):
                    self._start(entry)
                    began = True
        return began

    def _clear(self, entry: Entry) -> bool:
        """Spans and holds wait until their instances' schedulers are empty, unless they go beside."""
        return entry.kind == "door" or entry.beside or not any(self.load[i] for i in entry.group)

    def _start(self, entry: Entry) -> None:
        world = self.world
        self.lanes.start(entry)
        self._touch(entry.group)
        if entry.kind == "hold":
            for i in entry.group:
                self._held_s[i] = (entry.owner, world.now)
            world.news.append(Held(entry.owner, entry.group))
        elif entry.kind == "door":
            journey = world.journeys[entry.owner]
            journey.door = None
            waiting: Waiting = entry.payload  # type: ignore[assignment]
            self._count_door(entry, -1)
            self._enter(journey, entry.group, waiting.phase)
        else:
            run: SpanRun = entry.payload  # type: ignore[assignment]
            layers = world.spec.shape.layers
            since = self._paused_s.pop(entry.owner, world.now)
            for i in entry.group:
                world.bar("pause", i, since, entry.owner)
            run.began_s = world.now
            self.occupy(entry.group, 1)
            run.due_s = world.now + run.extra_s + run.predicted_s * run.factor * (1.0 - run.layer / layers)
            run.serial += 1
            world.spans += 1
            world.push(run.due_s, SPAN, ("done", entry, run.serial))
            for other in run.along:
                other.state = "running"
                other.payload.began_s, other.payload.due_s = run.began_s, run.due_s  # type: ignore[attr-defined]
            for member in (entry, *run.along):
                self._begun(member)
            if self.timeline.started(entry, world.now):
                self._anew()

    def _begun(self, entry: Entry) -> None:
        """A request's span begins: its KV is announced to whom it will be sent."""
        journey = self.world.journeys[entry.owner]
        if journey.scheduled_s is None:
            journey.scheduled_s = self.world.now
        to = self._sends.get(entry.owner, {}).pop(entry.payload.index, None)  # type: ignore[attr-defined]
        if to is not None:
            self._announce(journey, entry, to, self.world.now)

    def ended(self, entry: Entry) -> None:
        """A span is complete."""
        run: SpanRun = entry.payload  # type: ignore[assignment]
        self.lanes.finish(entry)
        for member in (entry, *run.along):
            member.state = "done"
            self._untoken(member)
        for other in run.along:
            self._send_late(other)
        self._touch(entry.group)
        journey = self.world.journeys[entry.owner]
        if len(journey.entries) > run.index + 1:
            self._touch(journey.entries[run.index + 1].group)
        self._send_late(entry)
        if self.timeline.finished(entry, self.world.now):
            self._anew()

    def _untoken(self, entry: Entry) -> None:
        """A span's tokens no longer wait or run."""
        span = entry.payload.span  # type: ignore[attr-defined]
        for i in entry.group:
            self._tokens[i] -= (span.end - span.start) / len(entry.group)

    def _send_late(self, entry: Entry) -> None:
        for piece in self._late.pop(id(entry), ()):
            self.world.push(self.world.now + piece.send_s / self.world.spec.shape.layers, SENT, piece)

    def park(self, entry: Entry) -> None:
        """A paused span, and those after it, leave the lanes."""
        journey = self.world.journeys[entry.owner]
        for other in journey.entries[entry.payload.index :]:  # type: ignore[attr-defined]
            self.lanes.park(other)
            self._touch(other.group)
        self._paused_s[entry.owner] = self.world.now
        self._anew()

    def _anew(self) -> None:
        self._stale.update(self.timeline.anew(self.world.now))

    # -- schedulers ---------------------------------------------------------------------------------------------------

    def _engine(self, group: tuple[int, ...]) -> Engine:
        engine = self.world.engines.get(group)
        if engine is None:
            world = self.world
            index = len(world.engines)
            spec = world.spec.engine([world.book.instances[i] for i in group])
            noise = NoiseSource(world.how.noise, f"noise {world.how.seed} {group}")
            fast = world.how.fast_forward and spec.config.stages == 1
            engine = Engine(index, group, Replica(index, spec, noise, fast, None))
            world.engines[group] = engine
            for i in group:
                self._on[i].append(engine)
        return engine

    def _enter(self, journey: Journey, group: tuple[int, ...], phase: Phase) -> None:
        engine, now = self._engine(group), self.world.now
        again = engine.replica.cut(now)
        if again is not None:
            self.world.push(again[0], STEP, (engine, again[1]))
        track = journey.stay(phase)
        try:
            engine.add(track, now)
        except RequestError as error:
            self.world.drop(journey, f"rejected: {error}")
            return
        journey.track, journey.group, journey.phase = track, group, phase
        for i in group:
            self.load[i] += 1
        self.touch(group, engine)

    def stayed(self, journey: Journey, track: Track) -> None:
        """A request's stay in a scheduler has ended by itself."""
        for i in journey.group:
            self.load[i] -= 1
        self._touch(journey.group)
        journey.take(track)
        if journey.left <= 0:
            self.world.finish(journey)
        else:
            self.world.news.append(Prefilled(journey.request.id, journey.group))

    def _unstay(self, journey: Journey, why: str = "moved") -> None:
        """Take a request out of its scheduler, with the tokens that it has."""
        track = journey.track
        if track is None:
            return
        engine = self._engine(journey.group)
        again = engine.replica.cut(self.world.now)
        if again is not None:
            self.world.push(again[0], STEP, (engine, again[1]))
        engine.drop(journey.request.id, self.world.now, why)
        for i in journey.group:
            self.load[i] -= 1
        self.touch(journey.group, engine)
        journey.take(track)

    def pump(self) -> Iterable[tuple[Engine, float, int]]:
        """Start transfers and batches."""
        world = self.world
        for piece in self.transfers.start(world.now, self._computed_s):
            world.push(piece.done_s, SENT, piece)
        for index in sorted(self._engines):
            engine = self._engines[index]
            if self._may_run(engine):
                for at_s, batch in engine.replica.pump(world.now, world.end_s):
                    if batch >= 0:
                        self.occupy(engine.group, 1)
                    yield engine, at_s, batch
        self._engines.clear()

    def _may_run(self, engine: Engine) -> bool:
        """A span that runs alone on one of its instances stops a scheduler at its next iteration."""
        return all((run := self.lanes.running[i]) is None or run.beside for i in engine.group)

    # -- ends ---------------------------------------------------------------------------------------------------------

    def forget(self, journey: Journey) -> None:
        """Whatever a request has anywhere is free."""
        name = journey.request.id
        self._unstay(journey, "ended")
        if journey.door is not None:
            self.lanes.park(journey.door)
            self._count_door(journey.door, -1)
            journey.door = None
            self._anew()
        left = [entry for entry in journey.entries if entry.state != "done"]
        for entry in left:
            self._send_late(entry)
            self._leave_span(entry)
        self.transfers.drop(name)
        self._sends.pop(name, None)
        self._paused_s.pop(name, None)
        self._release(Release(name))
        if left:
            self._anew()

    def _leave_span(self, entry: Entry) -> None:
        """A request that has ended leaves a span; a batch goes on as long as anybody of it is left."""
        run: SpanRun = entry.payload  # type: ignore[assignment]
        lead = run.lead
        if lead is not None:
            lead.payload.along.remove(entry)  # type: ignore[attr-defined]
            self._untoken(entry)
            entry.state = "parked"
            if lead.payload.along or self.world.journeys[lead.owner].ended_s is None:  # type: ignore[attr-defined]
                return
            entry = lead
            run = entry.payload  # type: ignore[assignment]
        elif run.along:
            return
        run.serial += 1
        if entry.state == "running":
            self.occupy(entry.group, -1)
        self._untoken(entry)
        self.lanes.park(entry)
        self._touch(entry.group)

    def occupy(self, group: Iterable[int], change: int) -> None:
        """Something begins (+1) or ends (-1) to compute on these instances; overlaps are busy once."""
        for i in group:
            was, self._active[i] = self._active[i], self._active[i] + change
            if not was:
                self._since[i] = self.world.now
            elif not self._active[i]:
                self.world.busy_s[i] += self.world.now - self._since[i]

    def settle_busy(self) -> None:
        """Count what is still going on up to now."""
        for i, active in enumerate(self._active):
            if active:
                self.world.busy_s[i] += self.world.now - self._since[i]
                self._since[i] = self.world.now

    # -- what the view shows ------------------------------------------------------------------------------------------

    def _touch(self, group: Iterable[int]) -> None:
        self._touched.update(group)
        self._stale.update(group)

    def touch(self, group: Iterable[int], engine: Engine) -> None:
        """Something has changed there."""
        self._touch(group)
        self._engines[engine.index] = engine

    def flush(self) -> None:
        """Bring the book up to date."""
        book = self.world.book
        for i in sorted(self._stale):
            at = book.instances[i]
            free_s, queued, used, running = self.timeline.free_s[i], self._tokens[i], 0, 0
            for engine in self._on[i]:
                free_s = max(free_s, engine.free_at_s)
                queued += engine.queued / len(engine.group)
                used += engine.replica.ledger.used_tokens // len(engine.group)
                running += len(engine.stays)
            book.put(
                msgspec.structs.replace(
                    at, free_at_s=free_s, queued=round(queued), used=used, running=running, holder=self.lanes.holder[i]
                )
            )
            if not self.lanes.running[i]:
                for engine in self._on[i]:
                    self._engines.setdefault(engine.index, engine)
        self._stale.clear()
