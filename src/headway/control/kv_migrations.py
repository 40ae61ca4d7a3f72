"""KV migrations that a policy asks for: their slices, the time of their announcement, and their completion."""

from __future__ import annotations

from headway.control.backend import ActionImpossible
from headway.control.controlled_request import ControlledRequest
from headway.control.queue_entries import SpanEntry
from headway.control.state import ControllerState
from headway.control.transfer_queue import KvSlice
from headway.policy.placement.base import KvReady, TransferKv


class KvMigrations:
    """Transfers of requests' KV to one instance each, cut into slices for `TransferQueue`."""

    def __init__(self, state: ControllerState) -> None:
        self._state = state

    def transfer(self, action: TransferKv) -> None:
        """Announce the KV of one span (if it has not begun: when it begins), or all of a request's KV now."""
        state = self._state
        controlled = state.request(action.request)
        state.group((action.to,), controlled)
        if action.index is not None:
            if not 0 <= action.index < len(controlled.entries):
                raise ActionImpossible(f"{action.request} has no span {action.index}")
            entry = controlled.entries[action.index]
            begun = entry.state in ("running", "done")
            if begun:
                self._check_there(action.request, entry.group)
            # the handshake's time ranks the transfer: not before there is something to send
            controlled.transfer_targets[action.index] = action.to
            if begun:
                self.begun(entry)
            return
        # KV lies where the request was last resident, else where its last span was committed
        group = controlled.group or (controlled.entries[-1].group if controlled.entries else ())
        if not group:
            raise ActionImpossible(f"{action.request} has no KV anywhere")
        self._check_there(action.request, group)
        # KV of prompt and output tokens, one slice from each instance of the group
        known, share = controlled.request.prompt_tokens + controlled.output_tokens, len(group)
        state.transfers.add(
            [KvSlice(action.request, i, action.to, 0, known, share, None, action.overlapped) for i in group], state.now
        )
        state.backend.announced(controlled, action.to, state.now)

    def _check_there(self, request: str, holders: tuple[int, ...]) -> None:
        gone = self._state.gone.intersection(holders)
        if gone:
            raise ActionImpossible(f"KV of {request} was on instance {min(gone)}, which is gone")

    def begun(self, entry: SpanEntry) -> None:
        """Announce the KV of a span that begins, if a transfer of it was asked for."""
        to = entry.controlled.transfer_targets.pop(entry.index, None)
        if to is None:
            return
        span, share, prefix = entry.span, len(entry.group), entry.controlled.prefix
        # the group sends its copy of a cached prefix along, unless the target is where that came from
        start = 0 if prefix is not None and entry.index == 0 and to != prefix.instance else span.start
        kv_slices = [KvSlice(entry.owner, i, to, start, span.end, share, entry) for i in entry.group]
        self._state.transfers.add(kv_slices, self._state.now)
        self._state.backend.announced(entry.controlled, to, self._state.now)

    def sent(self, kv_slice: KvSlice, controlled: ControlledRequest | None) -> None:
        """Record that a slice has arrived; `controlled`: its request, None if that has ended."""
        state = self._state
        # spans that have not begun are still to be sent: the request keeps its place, and KvReady, which comes
        # once, waits
        more = controlled is not None and bool(controlled.transfer_targets)
        if state.transfers.finish(kv_slice, more) and controlled is not None and not more:
            controlled.kv_at.add(kv_slice.target)
            state.pending_events.append(KvReady(kv_slice.request, kv_slice.target))
