"""Committed spans from the instance queues to their end: commit, begin, pause, resume, completion, withdrawal."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from headway.control.backend import ActionImpossible
from headway.control.controlled_request import ControlledRequest
from headway.control.queue_entries import SpanEntry
from headway.control.state import ControllerState
from headway.policy.placement.base import CommitSpans, ResumeRequest, SpanPaused


class SpanDispatcher:
    """Queue entries of committed spans. Raises ActionImpossible for actions that cannot be carried out."""

    def __init__(
        self, state: ControllerState, begun: Callable[[SpanEntry], None], left: Callable[[SpanEntry], None]
    ) -> None:
        """`begun` is called with each span that begins, batched ones included, unless its request has ended; `left`
        with a span, or the first of a batch, that ends, pauses or is stopped."""
        self._state = state
        self._on_begin, self._on_left = begun, left

    # -- actions ------------------------------------------------------------------------------------------------------

    def commit(self, action: CommitSpans) -> None:
        """Append a request's spans to the queues of their groups, after any that it has committed before."""
        if action.batched_with:
            self._commit_batch(action)
            return
        state = self._state
        controlled = state.request(action.request)
        groups = [state.group(span.group, controlled) for span in action.spans]
        self._check_fresh((i for group in groups for i in group), action.version)
        # all spans are checked before the first is queued: an action is refused whole
        self._check_spans(controlled, action, groups)
        before = controlled.entries[-1] if controlled.entries else None
        controlled.prefix = action.prefix
        for span, group in zip(action.spans, groups, strict=True):
            seconds = state.backend.span_s((span,), self._nodes(group), before.group if before is not None else ())
            entry = SpanEntry(controlled, span, len(controlled.entries), group, seconds, before, action.concurrent)
            if action.prefix is not None and entry.index == 0:
                entry.ready_s = state.now + action.prefix.copy_s
            controlled.entries.append(entry)
            state.queues.append(entry)
            state.backend.committed(entry, state.now)
            # in this order: the next span's predicted start needs this one's predicted end
            state.timeline.extend(entry, state.now)
            state.add_tokens(group, span.end - span.start)
            state.touch(group)
            before = entry

    def _check_spans(self, controlled: ControlledRequest, action: CommitSpans, groups: list[tuple[int, ...]]) -> None:
        # the first span may start anywhere (after cached tokens); each next one where the last one ends
        at = controlled.entries[-1].span.end if controlled.entries else action.spans[0].start
        held = {i for i, holder in enumerate(self._state.queues.holder) if holder == action.request}
        for span, group in zip(action.spans, groups, strict=True):
            if span.start != at or span.end <= span.start:
                raise ActionImpossible(f"a span of tokens {span.start} to {span.end} does not go on from {at}")
            if held and not held.issuperset(group):
                raise ActionImpossible("a holder's spans must lie on what it holds")
            at = span.end
        if at > controlled.request.prompt_tokens:
            raise ActionImpossible(f"the prompt has {controlled.request.prompt_tokens} tokens, not {at}")

    def _check_fresh(self, instances: Iterable[int], version: int) -> None:
        changed_at = self._state.cluster.changed_at
        for i in instances:
            if changed_at[i] > version:
                raise ActionImpossible(f"instance {i} has changed since version {version}")

    def _nodes(self, group: tuple[int, ...]) -> int:
        nodes = self._state.queues.nodes
        return len({nodes[i] for i in group})

    def _commit_batch(self, action: CommitSpans) -> None:
        """Queue a batch: its first entry alone is in the queues; the others refer to it by `batch_leader`."""
        state = self._state
        spans = (*action.spans, *action.batched_with)
        requests = [state.request(span.request.id) for span in spans]
        group = state.group(spans[0].group, requests[0])
        self._check_fresh(group, action.version)
        names = {controlled.request.id for controlled in requests}
        if len(action.spans) != 1 or len(names) != len(spans) or spans[0].request.id != action.request:
            raise ActionImpossible("a batch has one span of each of its requests, the first one's first")
        # a reservation is of one request; the batch's other members would compute on instances that are not theirs
        if any(state.queues.holder[i] is not None for i in group):
            raise ActionImpossible("a batch cannot run on instances that are held")
        for span, controlled in zip(spans, requests, strict=True):
            if state.group(span.group, controlled) != group or controlled.entries:
                raise ActionImpossible("a batch runs on one group, and its requests have no other spans")
            if not 0 <= span.start < span.end <= controlled.request.prompt_tokens:
                raise ActionImpossible(f"tokens {span.start} to {span.end} are not in {span.request.id}'s prompt")
        # one prediction for the batch: its spans begin and end together
        seconds = state.backend.span_s(spans, self._nodes(group), ())
        entries = [
            SpanEntry(controlled, span, 0, group, seconds, None, action.concurrent)
            for span, controlled in zip(spans, requests, strict=True)
        ]
        for entry in entries:
            entry.controlled.entries.append(entry)
            state.add_tokens(group, entry.span.end - entry.span.start)
        leader, *others = entries
        for entry in others:
            # `InstanceQueues.append` sets the state of the leader only
            entry.state, entry.batch_leader = "waiting", leader
        leader.batched_with = others
        state.queues.append(leader)
        state.backend.committed(leader, state.now)
        state.timeline.extend(leader, state.now)
        state.touch(group)

    def preempt(self, entry: SpanEntry) -> None:
        """Request a pause of a running span; `paused` follows, or `end` where it completes first."""
        if entry.batched_with or entry.batch_leader is not None:
            raise ActionImpossible(f"{entry.owner} is computed in a batch")
        self._state.backend.pause(entry, self._state.now)

    def resume(self, action: ResumeRequest) -> None:
        """Put a request's paused spans before everything that waits on their instances."""
        state = self._state
        paused = [entry for entry in state.request(action.request).entries if entry.state == "unqueued"]
        if not paused:
            raise ActionImpossible(f"{action.request} is not paused")
        # only the span that was interrupted has state to restore
        paused[0].extra_s = action.lost_s
        # `push` gives ever lower ranks: the last span first, so that the first span ends up in front
        for entry in reversed(paused):
            state.queues.push(entry)
            state.touch(entry.group)
        state.relayout()

    # -- what becomes of them -----------------------------------------------------------------------------------------

    def begin(self, entry: SpanEntry) -> None:
        """Begin a span whose turn has come, and those batched with it."""
        state = self._state
        entry.began_s = state.now
        # The group is held, and waits for cached KV that is still on its way
        entry.extra_s = max(entry.extra_s, entry.ready_s - state.now)
        state.backend.begin(entry, state.now)
        for other in entry.batched_with:
            other.state = "running"
        for member in (entry, *entry.batched_with):
            # KV slices are announced as the span begins: the handshake of Tetris §4.2
            if not member.controlled.ended:  # a batch goes on without its first
                self._on_begin(member)
        # a start off its predicted time shifts everything behind it
        if state.timeline.started(entry, state.now):
            state.relayout()

    def end(self, entry: SpanEntry) -> None:
        """Take a completed span off its group."""
        state = self._state
        self._on_left(entry)
        state.queues.finish(entry)
        for member in (entry, *entry.batched_with):
            member.state = "done"
            state.subtract_tokens(member)
        state.touch(entry.group)
        entries = entry.controlled.entries
        # the request's next span waited for this one, maybe on other instances: scan their queues too
        if len(entries) > entry.index + 1:
            state.touch(entries[entry.index + 1].group)
        if state.timeline.finished(entry, state.now):
            state.relayout()

    def paused(self, entry: SpanEntry, layer: int, tokens: int | None, share: float | None) -> None:
        """Take a paused span and the request's later ones out of the queues; see `ClusterController.span_paused`."""
        state = self._state
        entry.layer, entry.extra_s, entry.resumed = layer, 0.0, True
        entry.tokens, entry.share = entry.span.start if tokens is None else tokens, share
        self._on_left(entry)
        for other in entry.controlled.entries[entry.index :]:
            state.queues.unqueue(other)
            state.touch(other.group)
        state.relayout()
        state.pending_events.append(SpanPaused(entry.owner, entry.index, entry.progress()))

    def leave(self, entry: SpanEntry) -> None:
        """Take a request that has ended out of a span. A batch goes on until all of its members have ended."""
        state, leader = self._state, entry.batch_leader
        # three cases: a member of a batch, the leader of a batch with members left, a span of its own
        if leader is not None:
            leader.batched_with.remove(entry)
            state.subtract_tokens(entry)
            entry.state = "unqueued"
            # the last member of a batch whose leader's request has ended before: nothing is left to compute
            if leader.batched_with or not leader.controlled.ended:
                return
            entry = leader
        # the leader is in the queues for the batch: it stays until the members have ended
        elif entry.batched_with:
            return
        if entry.state == "running":
            self._on_left(entry)
            state.backend.stop(entry, state.now)
        state.subtract_tokens(entry)
        state.queues.unqueue(entry)
        state.touch(entry.group)
