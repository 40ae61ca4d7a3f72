"""Committed spans: onto the lanes, begun, paused and resumed, ended, left."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from headway.control.backend import ActionImpossible
from headway.control.queue_entries import SpanEntry
from headway.control.request import ControlledRequest
from headway.control.state import ControllerState
from headway.policy.placement.base import CommitSpans, ResumeRequest, SpanPaused


class SpanDispatcher:
    def __init__(self, state: ControllerState, begun: Callable[[SpanEntry], None]) -> None:
        """`begun` is told of each request's span that begins, if it has not ended before."""
        self._state = state
        self._tell_begun = begun

    # -- verbs --------------------------------------------------------------------------------------------------------

    def commit(self, action: CommitSpans) -> None:
        if action.batched_with:
            self._commit_batch(action)
            return
        state = self._state
        journey = state.journey(action.request)
        groups = [state.group(span.group, journey) for span in action.spans]
        self._check_fresh((i for group in groups for i in group), action.version)
        self._check_spans(journey, action, groups)
        before = journey.entries[-1] if journey.entries else None
        for span, group in zip(action.spans, groups, strict=True):
            seconds = state.hands.span_s((span,), self._nodes(group), before.group if before is not None else ())
            entry = SpanEntry(journey, span, len(journey.entries), group, seconds, before, action.concurrent)
            journey.entries.append(entry)
            state.lanes.append(entry)
            state.hands.committed(entry, state.now)
            state.timeline.extend(entry, state.now)
            state.count(group, span.end - span.start)
            state.touch(group)
            before = entry

    def _check_spans(self, journey: ControlledRequest, action: CommitSpans, groups: list[tuple[int, ...]]) -> None:
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
        """One entry on the lanes for all; each request has an entry of its own to be found by."""
        state = self._state
        spans = (*action.spans, *action.batched_with)
        journeys = [state.journey(span.request.id) for span in spans]
        group = state.group(spans[0].group, journeys[0])
        self._check_fresh(group, action.version)
        names = {journey.request.id for journey in journeys}
        if len(action.spans) != 1 or len(names) != len(spans) or spans[0].request.id != action.request:
            raise ActionImpossible("a batch has one span of each of its requests, the first one's first")
        if any(state.lanes.holder[i] is not None for i in group):
            raise ActionImpossible("a batch cannot run on instances that are held")
        for span, journey in zip(spans, journeys, strict=True):
            if state.group(span.group, journey) != group or journey.entries:
                raise ActionImpossible("a batch runs on one group, and its requests have no other spans")
            if not 0 <= span.start < span.end <= journey.request.prompt_tokens:
                raise ActionImpossible(f"tokens {span.start} to {span.end} are not in {span.request.id}'s prompt")
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
            entry.state, entry.lead = "waiting", lead
        lead.along = others
        state.lanes.append(lead)
        state.hands.committed(lead, state.now)
        state.timeline.extend(lead, state.now)
        state.touch(group)

    def preempt(self, entry: SpanEntry) -> None:
        """Ask a running span to pause."""
        if entry.along or entry.lead is not None:
            raise ActionImpossible(f"{entry.owner} is computed in a batch")
        self._state.hands.pause(entry, self._state.now)

    def resume(self, action: ResumeRequest) -> None:
        state = self._state
        parked = [entry for entry in state.journey(action.request).entries if entry.state == "parked"]
        if not parked:
            raise ActionImpossible(f"{action.request} is not paused")
        parked[0].extra_s = action.lost_s
        for entry in reversed(parked):
            state.lanes.push(entry)
            state.touch(entry.group)
        state.anew()

    # -- what becomes of them -----------------------------------------------------------------------------------------

    def begin(self, entry: SpanEntry) -> None:
        """A span's turn has come."""
        state = self._state
        state.hands.begin(entry, state.now)
        for other in entry.along:
            other.state = "running"
        for member in (entry, *entry.along):
            if not member.journey.ended:  # a batch goes on without its first
                self._tell_begun(member)
        if state.timeline.started(entry, state.now):
            state.anew()

    def end(self, entry: SpanEntry) -> None:
        """A span is complete."""
        state = self._state
        state.lanes.finish(entry)
        for member in (entry, *entry.along):
            member.state = "done"
            state.uncount(member)
        state.touch(entry.group)
        entries = entry.journey.entries
        if len(entries) > entry.index + 1:
            state.touch(entries[entry.index + 1].group)
        if state.timeline.finished(entry, state.now):
            state.anew()

    def park(self, entry: SpanEntry, layer: int, tokens: int | None, share: float | None) -> None:
        """A span has paused (see `Machine.span_paused`): it and those after it leave the lanes."""
        state = self._state
        entry.layer, entry.extra_s, entry.resumed = layer, 0.0, True
        entry.tokens, entry.share = entry.span.start if tokens is None else tokens, share
        for other in entry.journey.entries[entry.index :]:
            state.lanes.park(other)
            state.touch(other.group)
        state.anew()
        state.news.append(SpanPaused(entry.owner, entry.index, entry.progress()))

    def leave(self, entry: SpanEntry) -> None:
        """A request that has ended leaves a span; a batch goes on as long as anybody of it is left."""
        state, lead = self._state, entry.lead
        if lead is not None:
            lead.along.remove(entry)
            state.uncount(entry)
            entry.state = "parked"
            if lead.along or not lead.journey.ended:
                return
            entry = lead
        elif entry.along:
            return
        if entry.state == "running":
            state.hands.stop(entry, state.now)
        state.uncount(entry)
        state.lanes.park(entry)
        state.touch(entry.group)
