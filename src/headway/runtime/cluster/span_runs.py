"""Spans on live instances: begun on their groups, paused, resumed, and reported when all of a group have reported.

A batch (`policy.placement.base.Commit.along`) is computed one run after the other, on the group that it has for
itself, and
its end is told for all of it at the last one's.

Where an instance can only compute whole prompts (of which no KV moves), a span that is a whole prompt is a stay in its
scheduler, which ends as a span with the first token.
"""

from __future__ import annotations

from collections.abc import Callable

from headway.control.backend import ActionImpossible
from headway.control.queue_entries import SpanEntry
from headway.control.request import ControlledRequest
from headway.core.span import Span, Strategy
from headway.perf.hardware.shapes import ModelShape
from headway.policy.placement.base import Phase
from headway.runtime.cluster.attempt import RequestAttempt
from headway.runtime.cluster.instance_registry import InstanceRegistry
from headway.runtime.cluster.messages import ComputeSpan, PauseSpan, ResumeSpan, SpanTask, SpanTaskDone, SpanTaskPaused
from headway.runtime.engine.protocol import OutputDelta


class LiveSpanBatch:
    """What the controller keeps of spans that are being computed.

    over: requests that have all of their output with it; paused: the last word of where it was.
    """

    __slots__ = ("done", "over", "paused")

    def __init__(self) -> None:
        self.done: set[str] = set()
        self.over: set[str] = set()
        self.paused: SpanTaskPaused | None = None


class LiveSpanRuns:
    def __init__(
        self,
        fleet: InstanceRegistry,
        shape: ModelShape,
        rows: int,
        submit: Callable[[RequestAttempt, int, Phase], None],
        begun: Callable[[RequestAttempt], None],
    ) -> None:
        """rows: see `Run.rows`. submit: give a whole request to an instance's scheduler; begun: told when a group has
        been told of a run."""
        self._fleet, self._shape, self._rows, self._submit, self._begun = fleet, shape, rows, submit, begun

    def committed(self, entry: SpanEntry) -> None:
        """Its prompt goes to its group ahead of its turn."""
        for member in (entry, *entry.along):
            if self.computes(member):
                self._fleet.admit(_attempt(member.journey), member.group)

    def begin(self, entry: SpanEntry) -> None:
        """Its turn has come."""
        attempt = _attempt(entry.journey)
        if entry.resumed:
            attempt.running = set(entry.group)
            self._fleet.tell(entry.group, ResumeSpan(attempt.wire))
            return
        entry.driver = LiveSpanBatch()
        self._next(entry)

    def pause(self, entry: SpanEntry) -> None:
        """At the next layer edge."""
        attempt = _attempt(entry.journey)
        if not self.computes(entry) or attempt.running != set(entry.group):
            raise ActionImpossible(f"{entry.owner} cannot be paused any more")
        self._fleet.tell(entry.group[:1], PauseSpan(attempt.wire))

    def done(self, number: int, attempt: RequestAttempt, message: SpanTaskDone) -> SpanEntry | None:
        """An instance has computed its part; the entry that is complete with that."""
        entry = attempt.entry
        if entry is None or number not in attempt.running or message.index != entry.index:
            return None
        lead = entry.lead or entry
        asked = attempt.asked
        if asked.first_s is None and not attempt.said:
            asked.first_s = message.began_s
        if message.delta is not None:
            asked.tell(message.delta)
            if message.delta.finish is not None:
                attempt.finished = True
                lead.driver.over.add(entry.owner)
        attempt.running.discard(number)
        return None if attempt.running else self._complete(attempt, entry)

    def paused(self, number: int, attempt: RequestAttempt, message: SpanTaskPaused) -> SpanEntry | None:
        """An instance has stopped; the entry of which all have."""
        entry = attempt.entry
        if entry is None or number not in attempt.running or message.index != entry.index:
            return None
        attempt.running.discard(number)
        entry.driver.paused = message
        return None if attempt.running else entry

    def first_token(self, attempt: RequestAttempt, delta: OutputDelta) -> SpanEntry | None:
        """A whole prompt has its first token: the span that it was is complete."""
        entry = attempt.entry
        if entry is None:
            return None
        if delta.finish is not None:
            (entry.lead or entry).driver.over.add(entry.owner)
        return self._complete(attempt, entry)

    def left(self, attempt: RequestAttempt) -> SpanEntry | None:
        """A request has ended while its run was under way; the entry that is complete with that, of a batch."""
        entry = attempt.entry
        attempt.entry = None
        attempt.running.clear()
        if entry is None or (entry.driver is None and entry.lead is None):
            return None
        lead = entry.lead or entry
        return self._next(lead) if lead.state == "running" and lead.driver is not None else None

    def _complete(self, attempt: RequestAttempt, entry: SpanEntry) -> SpanEntry | None:
        attempt.entry = None
        if attempt.at is None:
            attempt.spread = entry.group if len(entry.group) > 1 else ()
            attempt.whole = set() if attempt.spread else set(entry.group)
        lead = entry.lead or entry
        lead.driver.done.add(entry.owner)
        return self._next(lead)

    def _next(self, lead: SpanEntry) -> SpanEntry | None:
        """Begin the batch's next run; the batch, when there is none."""
        for member in (lead, *lead.along):
            if member.owner not in lead.driver.done and not member.journey.ended:
                self._start(member)
                return None
        return lead

    def _start(self, entry: SpanEntry) -> None:
        attempt, span = _attempt(entry.journey), entry.span
        attempt.entry = entry
        if not self.computes(entry):
            self._submit(attempt, entry.group[0], "all")
            return
        run = self._run(span, entry.group)
        compute = ComputeSpan(
            id=attempt.wire,
            index=entry.index,
            run=run,
            before=tuple(attempt.runs),
            last=entry.last,
            beside=entry.beside,
            preemptible=not entry.along and entry.lead is None,
        )
        self._fleet.admit(attempt, entry.group)
        attempt.runs.append(run)
        attempt.running = set(entry.group)
        self._fleet.tell(entry.group, compute)
        self._begun(attempt)

    def _run(self, span: Span, group: tuple[int, ...]) -> SpanTask:
        """The span as instances compute it. Where its nodes are uneven they count as one, and where the model's heads
        cannot be cut for Ulysses, or each of an instance's processes keeps its own, it is a ring: what is computed is
        the same."""
        size, nodes = len(group), len({self._fleet[i].node for i in group})
        node = size // nodes if nodes > 1 and size % nodes == 0 else None
        strategy, width = span.strategy, node or size
        if max(self._fleet[i].ranks for i in group) > 1:
            if strategy.attn == "ulysses":
                strategy = Strategy("ring", strategy.mlp)
        elif "ulysses" in (strategy.attn, strategy.mlp) and not _divides(self._shape, width):
            strategy = Strategy("ring" if size > 1 else "local")
        return SpanTask(span.start, span.end, group, strategy, node, rows=self._rows)

    def computes(self, entry: SpanEntry) -> bool:
        """Whether a span is a run of its group; else a stay in a scheduler."""
        return all((one := self._fleet.get(i)) is not None and one.moves_kv for i in entry.group)


def _divides(shape: ModelShape, ranks: int) -> bool:
    """Whether the heads can be shared by so many."""
    return shape.q_heads % ranks == 0 and (shape.kv_heads % ranks == 0 or ranks % shape.kv_heads == 0)


def _attempt(journey: ControlledRequest) -> RequestAttempt:
    attempt: RequestAttempt = journey.driver
    return attempt
