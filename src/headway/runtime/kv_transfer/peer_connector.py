"""The connector `peers`: KV between ends, one-sided, through shared memory on one host and ZeroMQ between hosts.

A sender copies KV out of its slots into a slab (`slab_memory`) and pushes {request, piece, layer, heads, tokens, slab};
a thread of the receiver writes it into the reserved slots, gives the slab back, and answers when a piece is complete.
Computing threads take no part: what is written is read only after `KvReceived`, and slots that are being sent are
copied out before they change.

Every loss is reported on one side at least: a piece without an answer when its connection ends is lost to its sender,
one that has begun is lost to its receiver.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import msgspec

from headway.runtime.kv_transfer.body_notes import (
    Note,
    SlabFree,
    SliceEnd,
    decode,
    encode,
)
from headway.runtime.kv_transfer.connector import FinishedTransfers, KvConnector, KvPart, KvPlace, SaveKv
from headway.runtime.kv_transfer.peers import PeerLostError, PeerNetwork
from headway.runtime.kv_transfer.rank_routes import named
from headway.runtime.kv_transfer.receive_queue import NO_SCOPE, ReceiveQueue, SourceReader
from headway.runtime.kv_transfer.send_queue import KvPacket, SendQueue, packets_of
from headway.runtime.kv_transfer.slab_memory import MemoryKind, SharedMemory


class PeerConnector(KvConnector):
    """See `KvConnector`. Handles everything that is pushed to these peers. `kinds`: of memory that others may read, the
    preferred one first; all are understood."""

    def __init__(
        self, peers: PeerNetwork, wake: Callable[[], None], kinds: Sequence[MemoryKind] = (SharedMemory(),)
    ) -> None:
        self._peers, self._kinds = peers, kinds
        self._inbox = ReceiveQueue(wake)
        self._gate = threading.Lock()
        self._outlets: dict[int, SendQueue] = {}
        self._sources: dict[int, SourceReader] = {}
        self._ways: dict[SaveKv, tuple[SendQueue, list[int]]] = {}
        peers.handle(self._handle)
        peers.on_lost(self._lose)

    def update_state_after_alloc(self, request: str, place: KvPlace) -> None:
        self._inbox.open(request, place)

    def get_num_new_matched_tokens(self, request: str) -> int | None:
        return self._inbox.matched(request)

    def forget(self, request: str) -> None:
        self._inbox.close(request)
        for outlet in self._all():
            outlet.forget(request)
        for save in [save for save in self._ways if save.request == request]:
            del self._ways[save]

    def save_kv_layer(self, save: SaveKv, layer: int, part: KvPart) -> None:
        outlet, bodies = self._way(save)
        packets = list(packets_of(save, layer, part))
        bodies[0] += len(packets)
        outlet.add(save, packets)

    def finish_save(self, save: SaveKv) -> None:
        outlet, bodies = self._way(save)
        del self._ways[save]
        outlet.add(save, [KvPacket(save, SliceEnd(save.piece, bodies[0]))])

    def wait_for_save(self, request: str) -> None:
        for outlet in self._all():
            outlet.copy(request)

    def get_finished(self) -> FinishedTransfers:
        return self._inbox.take()

    def shutdown(self) -> None:
        for outlet in self._all():
            outlet.close()
        for source in self._sources.values():
            source.close()

    def _all(self) -> list[SendQueue]:
        with self._gate:
            return list(self._outlets.values())

    def _way(self, save: SaveKv) -> tuple[SendQueue, list[int]]:
        """Where a movement leaves, and its count of bodies so far.

        One connection for all of it: what was lost with a cut connection would be missing from a later one.
        """
        if save not in self._ways:
            outlet = self._outlets.get(save.to)
            if outlet is None:
                outlet = self._new(save.to)
                with self._gate:
                    self._outlets[save.to] = outlet
                outlet.start()
            # A connection that had ended before its queue was kept is told to no other.
            self._lose(save.to, "it is gone")
            self._ways[save] = outlet, [0]
        return self._ways[save]

    def _new(self, to: int) -> SendQueue:
        if to == self._peers.number:
            return SendQueue(to, _HomeLine(self._handle, to), (), self._inbox.fail)
        kinds = [kind for kind in self._kinds if kind.name != SharedMemory.name or self._peers.near(to)]
        try:
            return SendQueue(to, self._peers.line(NO_SCOPE, (to,)), kinds, self._inbox.fail)
        except PeerLostError as error:
            return SendQueue(to, _NoLine(str(error), to), (), self._inbox.fail)

    # -- in the peers' threads ----------------------------------------------------------------------------------------

    def _handle(self, source: int, request: str, said: bytes, body: memoryview) -> None:
        try:
            note = decode(said)
        except msgspec.DecodeError as error:
            self._inbox.fail(request, f"{named(source)} has sent what cannot be read: {error}")
            return
        with self._gate:
            outlet = self._outlets.get(source)
        if isinstance(note, SlabFree):
            if outlet is not None:
                outlet.freed(note)
        elif isinstance(note, SliceEnd) and note.kept:
            if outlet is not None:
                outlet.answered(SaveKv(request, note.piece, source))
        else:
            self._source(source).add((request, note, body))

    def _source(self, number: int) -> SourceReader:
        with self._gate:
            if number not in self._sources:
                kinds = {kind.name: kind for kind in (SharedMemory(), *self._kinds)}
                line = partial(self._peers.line, NO_SCOPE, (number,))
                self._sources[number] = SourceReader(number, self._inbox, kinds, line, partial(self._tell, number))
            return self._sources[number]

    def _tell(self, source: int, request: str, note: Note) -> None:
        if source == self._peers.number:
            self._handle(source, request, encode(note), memoryview(b""))
            return
        with suppress(PeerLostError):  # without a connection the sender has noticed the loss itself
            self._peers.push(source, request, encode(note))

    def _lose(self, end: int, why: str) -> None:
        """A connection has ended, maybe not that of the present queue."""
        with self._gate:
            outlet, source = self._outlets.get(end), self._sources.get(end)
            gone = None if outlet is None else outlet.gone
            if gone is not None:
                del self._outlets[end]
        if outlet is not None and gone is not None:
            outlet.close(gone)
        if source is not None:
            source.add(why)


class _HomeLine:
    """To this end itself: it gathers KV of which it holds a part."""

    def __init__(self, handle: Callable[[int, str, bytes, memoryview], None], number: int) -> None:
        self._handle, self._number = handle, number

    def push(self, to: int, note: bytes, body: memoryview, scope: str) -> None:
        """See `SendLine`."""
        self._handle(self._number, scope, note, body)

    def check(self) -> None:
        """It is always there."""


class _NoLine:
    """To an end that is not there."""

    def __init__(self, why: str, to: int) -> None:
        self._why, self._to = why, to

    def push(self, to: int, note: bytes, body: memoryview, scope: str) -> None:
        """See `SendLine`."""

    def check(self) -> None:
        """Raises PeerLostError."""
        raise PeerLostError(self._why, self._to)
