"""Spans on live instances: begun on their groups, paused, resumed, and reported when all of a group have reported.

A batch (`policy.placement.base.CommitSpans.batched_with`) is computed one span task after the other, on a group of its
own, and is reported complete at the end of its last task.

On an instance that can only compute whole prompts (no KV moves from or to it), a span that is a whole prompt is given
to the scheduler, and ends as a span with the first token.
"""

from __future__ import annotations

from collections.abc import Callable

from headway.control.backend import ActionImpossible
from headway.control.controlled_request import ControlledRequest
from headway.control.kv_admission import KvAdmission
from headway.control.queue_entries import SpanEntry
from headway.core.span import Span, Strategy
from headway.perf.hardware.shapes import ModelShape
from headway.policy.placement.base import Phase
from headway.runtime.cluster.attempt import RequestAttempt
from headway.runtime.cluster.instance_registry import InstanceRegistry
from headway.runtime.engine.instance_protocol import (
    ComputeSpan,
    PauseRequest,
    ResumeSpan,
    SpanTask,
    SpanTaskDone,
    SpanTaskPaused,
)
from headway.runtime.engine.protocol import OutputDelta


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
        fleet: InstanceRegistry,
        rooms: KvAdmission,
        shape: ModelShape,
        rows: int,
        submit: Callable[[RequestAttempt, int, Phase], None],
    ) -> None:
        """rows: see `SpanTask.rows`. submit: gives a whole request to an instance's scheduler."""
        self._fleet, self._rooms, self._shape, self._rows, self._submit = fleet, rooms, shape, rows, submit

    def fits(self, entry: SpanEntry) -> bool:
        """See `InstanceBackend.fits`. A prompt that a scheduler computes gets its blocks from that scheduler, chunk by
        chunk."""
        return not self.computes(entry) or self._rooms.fits(entry)

    def committed(self, entry: SpanEntry, now: float) -> None:
        """Send the prompts of a committed batch to its group, ahead of its turn."""
        for member in (entry, *entry.batched_with):
            if self.computes(member):
                self._fleet.admit(_attempt(member.controlled), member.group)

    def begin(self, entry: SpanEntry, now: float) -> None:
        """Begin or resume a span, or a batch of them."""
        if self.computes(entry):
            self._rooms.begun(entry)
        attempt = _attempt(entry.controlled)
        if entry.resumed:
            attempt.running = set(entry.group)
            self._fleet.tell(entry.group, ResumeSpan(attempt.wire))
            return
        entry.backend_state = LiveSpanBatch()
        self._next(entry)

    def pause(self, entry: SpanEntry, now: float) -> None:
        """Pause a span at the next layer edge. Raises ActionImpossible when part of its group is done with it."""
        attempt = _attempt(entry.controlled)
        if not self.computes(entry) or attempt.running != set(entry.group):
            raise ActionImpossible(f"{entry.owner} cannot be paused any more")
        # Only the first instance is asked: the others follow it, so that all stop at the same layer.
        self._fleet.tell(entry.group[:1], PauseRequest(attempt.wire))

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
        self._fleet.admit(attempt, entry.group)
        # `before` above is a copy made without this task: the layout that the instances find.
        attempt.runs.append(run)
        attempt.running = set(entry.group)
        # To all of the group at once and in one order: groups that overlap cannot wait for each other.
        self._fleet.tell(entry.group, compute)
        return None

    def _run(self, span: Span, group: tuple[int, ...]) -> SpanTask:
        """Return the task that computes a span.

        Uneven nodes count as one node. A ring replaces Ulysses where the model's heads cannot be divided by the group,
        or instances are tensor-parallel; the result is the same.
        """
        # `node`: instances per node; None: the group is, or counts as, one node.
        size, nodes = len(group), len({self._fleet[i].node for i in group})
        node = size // nodes if nodes > 1 and size % nodes == 0 else None
        strategy, width = span.strategy, node or size
        if max(self._fleet[i].ranks for i in group) > 1:
            if strategy.attn == "ulysses":
                strategy = Strategy("ring", strategy.mlp)
        elif "ulysses" in (strategy.attn, strategy.mlp) and not self._shape.heads_divide(width):
            strategy = Strategy("ring" if size > 1 else "local")
        return SpanTask(span.start, span.end, group, strategy, node, rows=self._rows)

    def computes(self, entry: SpanEntry) -> bool:
        """Whether a span is a task of its group; otherwise a scheduler computes it as a whole prompt."""
        return all((one := self._fleet.get(i)) is not None and one.moves_kv for i in entry.group)


def _attempt(controlled: ControlledRequest) -> RequestAttempt:
    attempt: RequestAttempt = controlled.backend_state
    return attempt
