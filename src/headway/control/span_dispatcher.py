"""Committed spans from the instance queues to their end: commit, begin, pause, resume, completion, withdrawal."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from headway.control.backend import ActionImpossible
from headway.control.queue_entries import SpanEntry
from headway.control.request import ControlledRequest
from headway.control.state import ControllerState
from headway.policy.placement.base import CommitSpans, ResumeRequest, SpanPaused


class SpanDispatcher:
    """Queue entries of committed spans. Raises ActionImpossible for actions that cannot be carried out."""

    def __init__(self, state: ControllerState, begun: Callable[[SpanEntry], None]) -> None:
        """`begun` is called with each span that begins, batched ones included, unless its request has ended."""
        self._state = state
        self._tell_begun = begun

    # -- verbs --------------------------------------------------------------------------------------------------------

    def commit(self, action: CommitSpans) -> None:
        """Append a request's spans to the queues of their groups, after any that it has committed before."""
        if action.batched_with:
            self._commit_batch(action)
            return
        state = self._state
        journey = state.journey(action.request)
        groups = [state.group(span.group, journey) for span in action.spans]
        self._check_fresh((i for group in groups for i in group), action.version)
        # all spans are checked before the first is queued: an action is refused whole
        self._check_spans(journey, action, groups)
        before = journey.entries[-1] if journey.entries else None
        for span, group in zip(action.spans, groups, strict=True):
            seconds = state.hands.span_s((span,), self._nodes(group), before.group if before is not None else ())
            entry = SpanEntry(journey, span, len(journey.entries), group, seconds, before, action.concurrent)
            journey.entries.append(entry)
            state.lanes.append(entry)
            state.hands.committed(entry, state.now)
            # in this order: the next span's predicted start needs this one's predicted end
            state.timeline.extend(entry, state.now)
            state.count(group, span.end - span.start)
            state.touch(group)
            before = entry

    def _check_spans(self, journey: ControlledRequest, action: CommitSpans, groups: list[tuple[int, ...]]) -> None:
        # the first span may start anywhere (after cached tokens); each next one where the last one ends
        at = journey.entries[-1].span.end if journey.entries else action.spans[0].start
        held = {i for i, holder in enumerate(self._state.lanes.holder) if holder == action.request}
        for span, group in zip(action.spans, groups, strict=True):
            if span.start != at or span.end <= span.start:
                raise ActionImpossible(f"a span of tokens {span.start} to {span.end} does not go on from {at}")
            if held and not held.issuperset(group):
                raise ActionImpossible("a holder's spans must lie on what it holds")
            at = span.end
        if at > journey.request.prompt_tokens:
            raise ActionImpossible(f"the prompt has {journey.request.prompt_tokens} tokens, not {at}")

    def _check_fresh(self, instances: Iterable[int], version: int) -> None:
        changed_at = self._state.book.changed_at
        for i in instances:
            if changed_at[i] > version:
                raise ActionImpossible(f"instance {i} has changed since version {version}")

    def _nodes(self, group: tuple[int, ...]) -> int:
        nodes = self._state.lanes.nodes
        return len({nodes[i] for i in group})

    def _commit_batch(self, action: CommitSpans) -> None:
        """Queue a batch: its first entry alone stands in the queues; the others refer to it by `lead`."""
        state = self._state
        spans = (*action.spans, *action.batched_with)
        journeys = [state.journey(span.request.id) for span in spans]
        group = state.group(spans[0].group, journeys[0])
        self._check_fresh(group, action.version)
        names = {journey.request.id for journey in journeys}
        if len(action.spans) != 1 or len(names) != len(spans) or spans[0].request.id != action.request:
            raise ActionImpossible("a batch has one span of each of its requests, the first one's first")
        # a reservation is of one request; the batch's other members would compute on instances that are not theirs
        if any(state.lanes.holder[i] is not None for i in group):
            raise ActionImpossible("a batch cannot run on instances that are held")
        for span, journey in zip(spans, journeys, strict=True):
            if state.group(span.group, journey) != group or journey.entries:
                raise ActionImpossible("a batch runs on one group, and its requests have no other spans")
            if not 0 <= span.start < span.end <= journey.request.prompt_tokens:
                raise ActionImpossible(f"tokens {span.start} to {span.end} are not in {span.request.id}'s prompt")
        # one prediction for the batch: its spans begin and end together
        seconds = state.hands.span_s(spans, self._nodes(group), ())
        entries = [
            SpanEntry(journey, span, 0, group, seconds, None, action.concurrent)
            for span, journey in zip(spans, journeys, strict=True)
        ]
        for entry in entries:
            entry.journey.entries.append(entry)
            state.count(group, entry.span.end - entry.span.start)
        lead, *others = entries
        for entry in others:
            # `InstanceQueues.append` sets the state of the lead only
            entry.state, entry.lead = "waiting", lead
        lead.along = others
        state.lanes.append(lead)
        state.hands.committed(lead, state.now)
        state.timeline.extend(lead, state.now)
        state.touch(group)

    def preempt(self, entry: SpanEntry) -> None:
        """Request a pause of a running span; `park` follows, or `end` where it completes first."""
        if entry.along or entry.lead is not None:
            raise ActionImpossible(f"{entry.owner} is computed in a batch")
        self._state.hands.pause(entry, self._state.now)

    def resume(self, action: ResumeRequest) -> None:
        """Put a request's paused spans before everything that waits on their instances."""
        state = self._state
        parked = [entry for entry in state.journey(action.request).entries if entry.state == "parked"]
        if not parked:
            raise ActionImpossible(f"{action.request} is not paused")
        # only the span that was interrupted has state to restore
        parked[0].extra_s = action.lost_s
        # `push` gives ever lower ranks: the last span first, so that the first span ends up in front
        for entry in reversed(parked):
            state.lanes.push(entry)
            state.touch(entry.group)
        state.anew()

    # -- what becomes of them -----------------------------------------------------------------------------------------

    def begin(self, entry: SpanEntry) -> None:
        """Begin a span whose turn has come, and those batched with it."""
        state = self._state
        state.hands.begin(entry, state.now)
        for other in entry.along:
            other.state = "running"
        for member in (entry, *entry.along):
            # KV slices are announced as the span begins: the handshake of Tetris §4.2
            if not member.journey.ended:  # a batch goes on without its first
                self._tell_begun(member)
        # a start off its predicted time shifts everything behind it
        if state.timeline.started(entry, state.now):
            state.anew()

    def end(self, entry: SpanEntry) -> None:
        """Take a completed span off its group."""
        state = self._state
        state.lanes.finish(entry)
        for member in (entry, *entry.along):
            member.state = "done"
            state.uncount(member)
        state.touch(entry.group)
        entries = entry.journey.entries
        # the request's next span waited for this one, maybe on other instances: scan their queues too
        if len(entries) > entry.index + 1:
            state.touch(entries[entry.index + 1].group)
        if state.timeline.finished(entry, state.now):
            state.anew()

    def park(self, entry: SpanEntry, layer: int, tokens: int | None, share: float | None) -> None:
        """Take a paused span and the request's later ones out of the queues; see `ClusterController.span_paused`."""
        state = self._state
        entry.layer, entry.extra_s, entry.resumed = layer, 0.0, True
        entry.tokens, entry.share = entry.span.start if tokens is None else tokens, share
        for other in entry.journey.entries[entry.index :]:
            state.lanes.park(other)
            state.touch(other.group)
        state.anew()
        state.news.append(SpanPaused(entry.owner, entry.index, entry.progress()))

    def leave(self, entry: SpanEntry) -> None:
        """Take a request that has ended out of a span. A batch goes on until all of its members have ended."""
        state, lead = self._state, entry.lead
        # three cases: a member of a batch, the lead of a batch with members left, a span of its own
        if lead is not None:
            lead.along.remove(entry)
            state.uncount(entry)
            entry.state = "parked"
            # the last member of a batch whose lead's request has ended before: nothing is left to compute
            if lead.along or not lead.journey.ended:
                return
            entry = lead
        # the lead stands in the queues for the batch: it stays until the members have ended
        elif entry.along:
            return
        if entry.state == "running":
            state.hands.stop(entry, state.now)
        state.uncount(entry)
        state.lanes.park(entry)
        state.touch(entry.group)
