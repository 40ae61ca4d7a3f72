"""KV migrations between instances: a reservation on the target first, then the slices, then the action that waits.

The controller grants a slice when the target has reserved blocks for it (`ready`); it is sent layer by layer while its
span is computed. When another span of the request has begun meanwhile, the KV has been spread over that span's group:
such a slice waits until the last span is computed, and all instances of that group send their part of it. (A span of a
batch that has begun may have to wait for other members' tasks; so do its slices.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from headway.control.controlled_request import ControlledRequest
from headway.control.transfer_queue import KvSlice
from headway.runtime.cluster.attempt import AttemptTable, KvMovement, RequestAttempt, ReservedKv
from headway.runtime.cluster.instance_registry import InstanceRegistry
from headway.runtime.engine.instance_protocol import KvArrived, ReserveKv, SendKv

_WHAT = "move"


class LiveKvMigrations:
    def __init__(self, fleet: InstanceRegistry, attempts: AttemptTable, sent: Callable[[KvSlice], None]) -> None:
        """sent: called with each slice of the controller that has arrived."""
        self._fleet, self._attempts, self._sent = fleet, attempts, sent
        self._serial = self._asked = 0
        self.under_way = 0
        """Number of movements that have not arrived."""
        self.waiting: set[str] = set()
        """Names of requests that wait for a reservation on some instance."""

    def ready(self, piece: KvSlice) -> bool:
        """Return whether a slice could be sent now; reserve blocks for it on its target."""
        attempt, entry = self._attempts.named(piece.request), piece.entry
        if attempt is None:
            return True
        if entry is None and (attempt.finished or attempt.stopping):
            # The KV of an ended answer is not needed, but the controller waits for the slice: `send` counts it as sent.
            # A decode that is being halted emits another token: its reservation is made when it has stopped.
            return attempt.finished
        self.reserve(attempt, piece.target)
        return attempt.room[piece.target].granted and (entry is None or self._newest(attempt, piece) or _done(attempt))

    def send(self, piece: KvSlice, now: float) -> None:
        """Send a slice that is `ready`.

        A decode that continues may have emitted tokens since blocks were reserved: KV beyond the reservation is not
        sent.
        """
        attempt, entry = self._attempts.named(piece.request), piece.entry
        # The request has ended, and its batch may go on: the slice counts as sent, so that its slot is free again.
        if attempt is None or (entry is None and attempt.finished):
            self._sent(piece)
            return
        # A decode has emitted more tokens than it had when its slice was announced, so `piece.end` is too small.
        known = attempt.kv_tokens
        end = min(known if entry is None else min(piece.end, known), attempt.room[piece.target].tokens)
        # KV that lies otherwise than the slice says: every holder sends its part, with the first of the slices.
        if attempt.step is not None if entry is None else not self._newest(attempt, piece):
            self._together(attempt, piece, end)
        else:
            self.bring(attempt, piece.target, (piece.source,), piece.start, end, partial(self._there, attempt, piece))

    @staticmethod
    def _newest(attempt: RequestAttempt, piece: KvSlice) -> bool:
        """Whether the slice's span is the newest task: it has begun, and no later one has spread its KV anew."""
        return piece.entry is not None and len(attempt.runs) == piece.entry.index + 1

    def _together(self, attempt: RequestAttempt, piece: KvSlice, end: int) -> None:
        """Let one movement from all holders stand for all slices of the same tokens and target."""
        key = piece.target, piece.start, end
        if key not in attempt.together:
            attempt.together[key] = []
            holders = attempt.spread or attempt.runs[-1].group
            self.bring(attempt, piece.target, holders, piece.start, end, partial(self._all_there, attempt, key))
        pieces = attempt.together[key]
        if pieces is None:
            self._there(attempt, piece)
        else:
            pieces.append(piece)

    def computed(self, attempt: RequestAttempt) -> None:
        """Report slices that arrived before their span was complete."""
        early, attempt.early = attempt.early, []
        for piece in early:
            self._there(attempt, piece)

    def gather(self, attempt: RequestAttempt, target: int, then: Callable[[], None]) -> None:
        """Bring all KV of a request to one instance, wherever the policy assumes it; then call `then`."""
        holders = attempt.spread or tuple(sorted(attempt.whole))
        self.bring(attempt, target, holders, 0, attempt.kv_tokens, then)

    def bring(
        self,
        attempt: RequestAttempt,
        target: int,
        holders: Sequence[int],
        start: int,
        end: int,
        then: Callable[[], None],
    ) -> None:
        """Move the KV of tokens [start, end) that `holders` have to `target`; call `then` when all of it has arrived.

        Each holder sends what it has of the range, which may be nothing, and reports that too.
        """
        self._serial += 1
        self.under_way += 1
        attempt.moving[self._serial] = KvMovement(set(holders), then)
        self.reserve(attempt, target)
        send = SendKv(id=attempt.wire, piece=self._serial, start=start, end=end, to=target)
        if attempt.room[target].granted:
            self._fleet.tell(holders, send)
        else:
            attempt.unsent += ((source, send) for source in holders)

    def announced(self, controlled: ControlledRequest, target: int, now: float) -> None:
        """Reserve blocks on a target ahead of the transfer, unless the KV will have grown by then."""
        attempt: RequestAttempt = controlled.backend_state
        # A decode that runs, or is about to stop, emits more tokens: its reservation is made when it has stopped.
        if not attempt.stopping and not attempt.finished and attempt.step is None:
            self.reserve(attempt, target)

    def reserve(self, attempt: RequestAttempt, target: int) -> None:
        """Ask an instance to reserve blocks for all KV of a request, once per target.

        As soon as the target is known, so that slices do not occupy their senders while they wait for blocks.
        """
        if target not in attempt.room:
            self._fleet.admit(attempt, (target,))
            self.waiting.add(attempt.request.id)
            self._fleet.kv.make(target, attempt.request.id, _WHAT, attempt.kv_tokens)
            # The serial tells this reservation's answer from that of an earlier one, which may still be on its way.
            self._asked += 1
            attempt.room[target] = ReservedKv(self._asked, attempt.kv_tokens)
            self._fleet.tell((target,), ReserveKv(attempt.wire, attempt.kv_tokens, self._asked))

    def reserved(self, attempt: RequestAttempt, target: int, serial: int) -> None:
        """Handle `ReserveKv`: send what waits for that reservation. Answers to an earlier serial are ignored."""
        reserved = attempt.room.get(target)
        if reserved is not None and serial == reserved.serial:
            reserved.granted = True
            # The instance sent a snapshot before this answer: from now on that shows the blocks as used.
            self._fleet.kv.kept(target, attempt.request.id, _WHAT)
            if all(each.granted for each in attempt.room.values()):
                self.waiting.discard(attempt.request.id)
            for source, send in attempt.unsent:
                if send.to == target:
                    self._fleet.tell((source,), send)
            attempt.unsent = [one for one in attempt.unsent if one[1].to != target]

    def arrived(self, attempt: RequestAttempt, message: KvArrived) -> None:
        """Handle `KvArrived`: one holder's part of a movement is there; the last one calls `then`."""
        movement = attempt.moving.get(message.piece)
        if movement is None:
            return
        movement.sources.discard(message.source)
        if not movement.sources:
            del attempt.moving[message.piece]
            self.under_way -= 1
            movement.then()

    def settled(self, attempt: RequestAttempt) -> None:
        """Withdraw a request's reservations and unsent slices: its KV is where it is decoded."""
        self._fleet.kv.forget(attempt.request.id, _WHAT)
        attempt.room.clear()
        attempt.unsent.clear()
        attempt.together.clear()
        self.waiting.discard(attempt.request.id)

    def forget(self, attempt: RequestAttempt) -> None:
        """Drop all movements and reservations of a request. The instances drop theirs at `AbortRequest`."""
        self.under_way -= len(attempt.moving)
        attempt.moving.clear()
        attempt.early.clear()
        self.settled(attempt)

    def _there(self, attempt: RequestAttempt, piece: KvSlice) -> None:
        """Report an arrived slice, once its span is complete on all of its group."""
        if piece.entry is not None and piece.entry.state == "running":
            attempt.early.append(piece)
        else:
            self._sent(piece)

    def _all_there(self, attempt: RequestAttempt, key: tuple[int, int, int]) -> None:
        pieces, attempt.together[key] = attempt.together.get(key), None
        for piece in pieces or ():
            self._there(attempt, piece)


def _done(attempt: RequestAttempt) -> bool:
    """Whether all spans of a request that were committed are computed."""
    return not attempt.running and len(attempt.runs) >= len(attempt.controlled.entries)
