"""KV on its way between instances: a reservation first, then the slices, then what waited for them.

A piece of a span is sent by its holder as soon as the machine grants it and there is room, layer by layer while the
span is computed. When another span of the request has begun meanwhile, KV has been spread over that one's group: such a
piece waits until the last span is computed, and all of that group send what they have of it. (Of a batch a span that
has begun may have to wait for others' runs; so do its pieces.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from headway.control.transfer_queue import KvSlice
from headway.runtime.cluster.attempt import KvMovement, RequestAttempt
from headway.runtime.cluster.instance_registry import InstanceRegistry
from headway.runtime.cluster.messages import KvArrived, ReserveKv, SendKv

_WHAT = "move"


class LiveKvMigrations:
    def __init__(self, fleet: InstanceRegistry, sent: Callable[[KvSlice], None]) -> None:
        """sent: told of each of the machine's pieces that is there."""
        self._fleet, self._sent = fleet, sent
        self._serial = self._asked = 0
        self.under_way = 0
        """Movements that have not arrived."""
        self.waiting: set[str] = set()
        """Requests that wait for room somewhere."""

    def send(self, attempt: RequestAttempt, piece: KvSlice) -> None:
        """The machine grants a piece. Of a decode that is to stop it waits until that has (`stays`). Where one goes on
        it may have said more since room was asked for: what there is no room for stays."""
        entry = piece.entry
        if entry is None and attempt.finished:
            self._sent(piece)
            return
        if entry is None and attempt.stopping:
            attempt.late.append(piece)
            return
        if entry is None and attempt.step is not None:
            self._of_group(attempt, piece)
            return
        if entry is not None and len(attempt.runs) != entry.index + 1:
            attempt.late.append(piece)
            self.computed(attempt)
            return
        self.reserve(attempt, piece.target)
        if entry is not None and not attempt.room[piece.target]:  # another run may begin before there is room
            attempt.late.append(piece)
            return
        known = attempt.kv_tokens  # a decode has said more than it had when its piece was announced
        end = min(known if entry is None else min(piece.end, known), attempt.space[piece.target])
        self.bring(attempt, piece.target, (piece.source,), piece.start, end, partial(self._there, attempt, piece))

    def _of_group(self, attempt: RequestAttempt, piece: KvSlice) -> None:
        """Of a decode of a group, all who hold anything send with the first of the pieces, whatever the policy thinks
        of who that is."""
        if piece.target in attempt.room:
            self._sent(piece)
        else:
            self.bring(
                attempt, piece.target, attempt.spread, 0, attempt.kv_tokens, partial(self._there, attempt, piece)
            )

    def begun(self, attempt: RequestAttempt) -> None:
        """A run was begun, later than its span where others of a batch came first, or there is room: pieces may go."""
        late, attempt.late = attempt.late, []
        for piece in late:
            self.send(attempt, piece)

    def computed(self, attempt: RequestAttempt) -> None:
        """A run is complete: pieces that are there already count now, and pieces that came too late for theirs may go
        when it was the last one."""
        early, attempt.early = attempt.early, []
        for piece in early:
            self._there(attempt, piece)
        if attempt.running or len(attempt.runs) < len(attempt.journey.entries):
            return
        late, attempt.late = attempt.late, []
        for start, end, target in sorted({(piece.start, piece.end, piece.target) for piece in late}):
            pieces = [piece for piece in late if (piece.start, piece.end, piece.target) == (start, end, target)]
            self.bring(attempt, target, attempt.runs[-1].group, start, end, partial(self._all_there, attempt, pieces))

    def gather(self, attempt: RequestAttempt, target: int, then: Callable[[], None]) -> None:
        """All KV of a request on one instance, whatever the policy thinks of where it is."""
        holders = attempt.spread or tuple(sorted(attempt.whole))
        self.bring(attempt, target, holders, 0, attempt.kv_tokens, then)

    def bring(
        self,
        attempt: RequestAttempt,
        target: int,
        holders: Iterable[int],
        start: int,
        end: int,
        then: Callable[[], None],
    ) -> None:
        """Move what these have of tokens [start, end); `then` follows when all of it is there."""
        self._serial += 1
        self.under_way += 1
        attempt.moving[self._serial] = KvMovement(set(holders), then)
        self.reserve(attempt, target)
        for source in holders:
            attempt.unsent.append(
                (source, SendKv(id=attempt.wire, piece=self._serial, start=start, end=end, to=target))
            )
        self._flush(attempt)

    def announced(self, attempt: RequestAttempt, target: int) -> None:
        """KV of it will be sent there: see to room at once, unless there will be more of it by then."""
        if not attempt.stopping and not attempt.finished and attempt.step is None:
            self.reserve(attempt, target)

    def reserve(self, attempt: RequestAttempt, target: int) -> None:
        """Have room kept for a request's KV, if that was not asked for: as soon as it is known where that goes, so that
        its pieces do not keep their senders while room is awaited."""
        if target not in attempt.room:
            self._fleet.admit(attempt, (target,))
            attempt.room[target] = False
            attempt.space[target] = attempt.kv_tokens
            self.waiting.add(attempt.request.id)
            self._fleet.promises.make(target, attempt.request.id, _WHAT, attempt.kv_tokens)
            self._asked += 1
            attempt.asked_as[target] = self._asked
            self._fleet.tell((target,), ReserveKv(attempt.wire, attempt.kv_tokens, self._asked))

    def reserved(self, attempt: RequestAttempt, target: int, serial: int) -> None:
        """There is room for what was asked for as `serial`."""
        if target in attempt.room and serial == attempt.asked_as[target]:
            attempt.room[target] = True
            self._fleet.promises.kept(target, attempt.request.id, _WHAT)
            if all(attempt.room.values()):
                self.waiting.discard(attempt.request.id)
            self._flush(attempt)
            self.begun(attempt)

    def arrived(self, attempt: RequestAttempt, message: KvArrived) -> None:
        """What one instance has sent is there."""
        movement = attempt.moving.get(message.piece)
        if movement is None:
            return
        movement.sources.discard(message.source)
        if not movement.sources:
            del attempt.moving[message.piece]
            self.under_way -= 1
            movement.then()

    def settled(self, attempt: RequestAttempt) -> None:
        """Room that was asked for is not needed, and nothing that waits for it is sent: its KV is where it stays."""
        self._fleet.promises.forget(attempt.request.id, _WHAT)
        attempt.room.clear()
        attempt.space.clear()
        attempt.asked_as.clear()
        attempt.unsent.clear()
        self.waiting.discard(attempt.request.id)

    def forget(self, attempt: RequestAttempt) -> None:
        """Nothing of it is awaited."""
        self.under_way -= len(attempt.moving)
        attempt.moving.clear()
        attempt.late.clear()
        attempt.early.clear()
        self.settled(attempt)

    def _flush(self, attempt: RequestAttempt) -> None:
        """Send what has room."""
        waiting = []
        for source, send in attempt.unsent:
            if attempt.room[send.to]:
                self._fleet.tell((source,), send)
            else:
                waiting.append((source, send))
        attempt.unsent = waiting

    def _there(self, attempt: RequestAttempt, piece: KvSlice) -> None:
        """A piece is there; it counts when its span is complete on all of its group."""
        if piece.entry is not None and piece.entry.state == "running":
            attempt.early.append(piece)
        else:
            self._sent(piece)

    def _all_there(self, attempt: RequestAttempt, pieces: list[KvSlice]) -> None:
        for piece in pieces:
            self._there(attempt, piece)
