"""The connector `peers`: KV between instances, one-sided, through shared memory on one host and sockets between hosts.

A sender pushes {request, slice, layer, heads, tokens} and bytes; the receiver's thread that reads the socket writes
them into the reserved slots, and answers when a slice is complete. On one host the bytes pass through the sender's
`SharedBuffer`: copied there from its slots, and from there to the receiver's. Computing threads take no part: what is
written is read only after `KvReceived`, and slots that are being sent are copied out before they change.

Every loss is reported on one side at least: a slice without an answer when its connection ends is lost to its sender,
one that has begun is lost to its receiver.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

import msgspec
import numpy as np

from headway.runtime.kv_transfer.body_notes import END, HERE, BodyNote, decode, encode
from headway.runtime.kv_transfer.connector import FinishedTransfers, KvConnector, KvPart, KvPlace, SaveKv
from headway.runtime.kv_transfer.peers import (
    PeerLostError,
    PeerNetwork,
    PeerStream,
    ReceivePlace,
    SendRoom,
    TransferCompletion,
)
from headway.runtime.kv_transfer.rank_routes import named
from headway.runtime.kv_transfer.receive_queue import ReceiveQueue
from headway.runtime.kv_transfer.send_queue import KvPacket, SendQueue, TransferRoute, packets_of


class PeerConnector(KvConnector):
    """See `KvConnector`. Handles everything that is pushed to these peers."""

    def __init__(self, peers: PeerNetwork, wake: Callable[[], None]) -> None:
        self._peers = peers
        self._inbox = ReceiveQueue(wake, self._answer)
        self._outlets: dict[int, SendQueue] = {}
        self._ways: dict[SaveKv, tuple[TransferRoute, list[int]]] = {}
        self._heres: dict[str, _LocalRoute] = {}
        self._gate = threading.Lock()
        self._unanswered: dict[SaveKv, TransferRoute] = {}
        peers.handle(self._handle)
        peers.on_lost(self._lose)

    def update_state_after_alloc(self, request: str, place: KvPlace) -> None:
        self._inbox.open(request, place)

    def get_num_new_matched_tokens(self, request: str) -> int | None:
        return self._inbox.matched(request)

    def forget(self, request: str) -> None:
        # The receiving side first: what is read from now on finds no place.
        self._inbox.close(request)
        for outlet in self._outlets.values():
            outlet.forget(request)
        for save in [save for save in self._ways if save.request == request]:
            del self._ways[save]
        with self._gate:
            for save in [save for save in self._unanswered if save.request == request]:
                self._unanswered.pop(save).dead = True
        here = self._heres.pop(request, None)
        if here is not None:
            here.close()

    def save_kv_layer(self, save: SaveKv, layer: int, part: KvPart) -> None:
        way, messages = self._way(save)
        packets = list(packets_of(save, way, layer, part))
        messages[0] += len(packets)
        self._outlet(save.to).add(packets)

    def finish_save(self, save: SaveKv) -> None:
        way, messages = self._way(save)
        del self._ways[save]
        self._outlet(save.to).add([KvPacket(save.request, way, BodyNote(save.piece, END, (messages[0], 0)))])

    def wait_for_save(self, request: str) -> None:
        for outlet in self._outlets.values():
            outlet.copy(request)

    def get_finished(self) -> FinishedTransfers:
        return FinishedTransfers(*self._inbox.take())

    def shutdown(self) -> None:
        for outlet in self._outlets.values():
            outlet.close()

    # -- in the threads that read -------------------------------------------------------------------------------------

    def _handle(self, source: int, request: str, said: bytes, length: int) -> ReceivePlace | None:
        try:
            note = decode(said)
        except msgspec.DecodeError as error:
            self._inbox.fail(request, f"{named(source)} has sent what cannot be read: {error}")
            return None
        if note.layer != HERE:
            return self._inbox.handle(source, request, note, length)
        with self._gate:
            self._unanswered.pop(SaveKv(request, note.piece, source), None)
        return None

    def _answer(self, source: int, request: str, piece: int) -> None:
        if source == self._peers.number:
            with self._gate:
                self._unanswered.pop(SaveKv(request, piece, source), None)
            return
        # Without a connection the sender has noticed the loss itself.
        with suppress(PeerLostError):
            self._peers.push(source, request, encode(BodyNote(piece, HERE, (0, 0))), ())

    def _lose(self, instance: int, why: str) -> None:
        """A connection has ended."""
        self._inbox.lose(instance, why)
        with self._gate:
            saves = [save for save in self._unanswered if save.to == instance]
            ways = [(save.request, self._unanswered.pop(save)) for save in saves]
            lost = {request for request, way in ways if not way.dead}
            for _, way in ways:
                way.dead = True
        for request in sorted(lost):
            self._inbox.fail(request, why, instance)

    # -- on the way out -----------------------------------------------------------------------------------------------

    def _outlet(self, to: int) -> SendQueue:
        if to not in self._outlets:
            self._outlets[to] = SendQueue(f"KV to {to}", self._inbox.fail)
        return self._outlets[to]

    def _there(self, request: str, to: int) -> TransferRoute:
        """To another end. Raises PeerLostError."""
        return RemoteRoute(self._peers.line(request, (to,)), to)

    def _way(self, save: SaveKv) -> tuple[TransferRoute, list[int]]:
        """Return the route of a movement, and its count of messages so far.

        One connection for all of it: messages lost with a cut connection would be missing from a later one.
        """
        if save not in self._ways:
            way: TransferRoute
            if save.to == self._peers.number:
                way = self._heres.setdefault(save.request, _LocalRoute(self._inbox, save.to, save.request))
            else:
                try:
                    way = self._there(save.request, save.to)
                except PeerLostError as error:
                    way = _DeadRoute(str(error), save.to)
            self._ways[save] = (way, [0])
            with self._gate:
                self._unanswered[save] = way
        return self._ways[save]


class RemoteRoute:
    """To another instance."""

    dead = False

    def __init__(self, line: PeerStream, to: int) -> None:
        self._line, self._to = line, to

    def room(self, size: int, again: Callable[[], None]) -> SendRoom | None:
        """See `TransferRoute.room`."""
        return self._line.room(self._to, size, again)

    def push(self, note: bytes, room: SendRoom) -> TransferCompletion:
        """See `TransferRoute.push`."""
        return self._line.push_from(self._to, note, room)

    def drop(self, room: SendRoom) -> None:
        """See `TransferRoute.drop`."""
        self._line.drop(self._to, room)


class _StagedRoute:
    """Ways for which a body is put together in memory of its own."""

    def room(self, size: int, again: Callable[[], None]) -> SendRoom | None:
        """See `TransferRoute.room`."""
        return SendRoom(np.empty(size, dtype=np.uint8))

    def drop(self, room: SendRoom) -> None:
        """See `TransferRoute.drop`."""


class _LocalRoute(_StagedRoute):
    """To this instance itself: it gathers KV of which it holds a part."""

    dead = False

    def __init__(self, inbox: ReceiveQueue, number: int, request: str) -> None:
        self._inbox, self._number, self._request = inbox, number, request
        self._gate = threading.Lock()

    def push(self, note: bytes, room: SendRoom) -> TransferCompletion:
        """See `TransferRoute.push`."""
        ticket = TransferCompletion()
        with self._gate:
            place = None
            if not self.dead:
                place = self._inbox.handle(self._number, self._request, decode(note), room.view.nbytes)
            if place is not None:
                if place.write is not None:
                    place.write(room.view)
                place.complete()
        ticket.finish()
        return ticket

    def close(self) -> None:
        """Nothing is written any more once this has returned."""
        with self._gate:
            self.dead = True


class _DeadRoute(_StagedRoute):
    """To an instance that is not there."""

    dead = False

    def __init__(self, why: str, to: int) -> None:
        self._why, self._to = why, to

    def push(self, note: bytes, room: SendRoom) -> TransferCompletion:
        """See `TransferRoute.push`."""
        ticket = TransferCompletion(self._to)
        ticket.finish(self._why)
        return ticket
