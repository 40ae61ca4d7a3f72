"""How KV moves between instances, one-sided: through shared memory on one host, and through ZeroMQ between hosts.

Names, where the meaning is the same, are those of vLLM's KV connectors (`KVConnectorBase_V1`). What is different, and
why: KV is pushed by its holder, slice by slice, and a decode begins when all of it is there (Tetris §4.2, step 6). So
nothing is loaded during a forward pass, no metadata travels with a batch, and source and target of a slice come from
the controller, not from a look-up of prompts.

A sender copies KV out of its slots into a slab and pushes {request, piece, layer, heads, tokens, slab};
a thread of the receiver writes it into the reserved slots, gives the slab back, and answers when a piece is complete.
Computing threads take no part: what is written is read only after `KvArrived`, and slots that are being sent are
copied out before they change.

Every loss is reported on one side at least: a piece without an answer when its connection ends is lost to its sender,
one that has begun is lost to its receiver.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
from msgspec.structs import replace
from typing_extensions import override

from headway.kv.allocator import SlotRanges, slot_ranges_of
from headway.runtime.engine.protocol import (
    KvArrived,
    PeerLostError,
    SpanTaskLost,
    TransferEnd,
    end_of,
    instance_of,
    named,
    rank_of,
    routes,
)
from headway.runtime.kv_transfer import slab_memory
from headway.runtime.kv_transfer.connector import (
    Bytes,
    KvBody,
    KvPart,
    KvPlace,
    MemoryOffer,
    Note,
    SaveKv,
    SlabFree,
    SliceEnd,
    by_runs,
    decode,
    encode,
    gather,
    scatter,
    spread,
)
from headway.runtime.kv_transfer.peers import PeerNetwork, PeerStream
from headway.runtime.kv_transfer.slab_memory import MemoryKind, SharedMemory, SlabMemory, SlabReader

# Sending KV to one end over one connection: copied out of the pool a body at a time, by a thread of its own.
#
# A body is copied when its turn comes and a slab is free, so that memory beside the pool is bounded, or earlier, when
# its slots are about to be overwritten. The computing thread never waits for the network.

_NO_BODY = memoryview(b"")


class KvPacket:
    """One message of a movement. `part`: where `size` bytes of it lie; None: it is the end. `body`: they had to be
    copied before their turn."""

    __slots__ = ("body", "chosen", "note", "part", "save", "size")

    def __init__(self, save: SaveKv, note: KvBody | SliceEnd, part: KvPart | None = None, chosen: slice = slice(0)):
        self.save, self.note, self.part, self.chosen = save, note, part, chosen
        self.size = 0 if part is None else _token_bytes(part) * (chosen.stop - chosen.start)
        self.body: Bytes | None = None

    def copy(self) -> None:
        """Take it out of the pool, unless that was done."""
        if self.body is None and self.part is not None:
            self.body = self.into(np.empty(self.size, dtype=np.uint8))

    def into(self, slab: Bytes) -> Bytes:
        """Put it together there."""
        view, part = slab[: self.size], self.part
        if self.body is not None:
            np.copyto(view, self.body)
        elif part is not None and isinstance(self.note, KvBody):
            heads = part.cache[self.note.layer, :, part.row : part.row + len(part.heads)]
            gather(heads, part.slots[self.chosen], view)
        return view


def _token_bytes(part: KvPart) -> int:
    return 2 * len(part.heads) * int(part.cache.shape[-1])


def packets_of(save: SaveKv, layer: int, part: KvPart) -> Iterator[KvPacket]:
    """A layer of a movement, as messages that slabs have room for."""
    heads, count = (part.heads.start, part.heads.stop), len(part.positions)
    most = max(1, slab_memory.SLAB_BYTES // _token_bytes(part))
    for at in range(0, count, most):
        chosen = slice(at, min(at + most, count))
        tokens = part.positions[chosen].astype(np.int32).tobytes()
        yield KvPacket(save, KvBody(save.piece, layer, heads, tokens), part, chosen)


class SendLine(Protocol):
    """What a queue needs of a connection (`PeerStream`)."""

    def push(self, to: int, note: bytes, body: memoryview, scope: str) -> object: ...

    def check(self) -> None: ...


class SendQueue:
    """To one end, for as long as `line` is there. `failed(request, why, end)`: see `ReceiveQueue.fail`; once for each
    request of which a piece has not been answered."""

    def __init__(
        self, to: int, line: SendLine, kinds: Sequence[MemoryKind], failed: Callable[[str, str, int | None], None]
    ) -> None:
        self.to = to
        self._line, self._kinds, self._failed = line, kinds, failed
        self._gate, self._copying = threading.Condition(), threading.Lock()
        self._queue: deque[KvPacket] = deque()
        self._unanswered: set[SaveKv] = set()
        self._lost: set[SaveKv] = set()
        self._memory = SlabMemory()
        self._free: list[int] = []
        self._taken: bool | None = None
        self._closed, self._why = False, ""

    def start(self) -> None:
        """Begin to send: what the other end says reaches this queue."""
        threading.Thread(target=self._run, name=f"KV to {self.to}", daemon=True).start()

    @property
    def pending(self) -> bool:
        """Whether a piece has not been answered."""
        return bool(self._unanswered)

    @property
    def gone(self) -> str | None:
        """Why the connection has ended; None while it has not."""
        try:
            self._line.check()
        except PeerLostError as error:
            return str(error)
        return None

    def add(self, save: SaveKv, packets: Iterable[KvPacket]) -> None:
        """To leave in order, behind all that were added before."""
        with self._gate:
            if not self._closed:
                self._unanswered.add(save)
                self._queue.extend(packets)
                self._gate.notify_all()
                return
            reported = save in self._lost
            self._lost.add(save)
        if self._why and not reported:
            self._failed(save.request, self._why, self.to)

    def copy(self, request: str) -> None:
        """Copy a request's packets that have not left out of the pool, so that its slots may be overwritten."""
        with self._copying:
            with self._gate:
                waiting = [packet for packet in self._queue if packet.save.request == request]
            for packet in waiting:
                packet.copy()

    def forget(self, request: str) -> None:
        """Drop a request's packets that have not left; its slots are not read once this has returned."""
        with self._copying, self._gate:
            self._queue = deque(packet for packet in self._queue if packet.save.request != request)
            self._unanswered = {save for save in self._unanswered if save.request != request}

    def close(self, why: str = "") -> None:
        """End the thread; nothing more leaves. why: pieces without an answer are lost. Harmless when repeated."""
        with self._copying, self._gate:
            if self._closed:
                return
            self._closed, self._why = True, why
            self._lost, self._unanswered = self._unanswered, set()
            lost = sorted({save.request for save in self._lost})
            self._queue.clear()
            self._gate.notify_all()
        for request in lost if why else ():
            self._failed(request, why, self.to)

    # -- what the other end says --------------------------------------------------------------------------------------

    def answered(self, save: SaveKv) -> None:
        """All of a piece is there."""
        with self._gate:
            self._unanswered.discard(save)

    def freed(self, note: SlabFree) -> None:
        """A slab has been read, or offered memory can be read there or not."""
        with self._gate:
            if note.memory != self._memory.number:
                return
            if note.slab is None:
                self._taken = note.taken
            elif 0 <= note.slab < len(self._memory.slabs) and note.slab not in self._free:
                self._free.append(note.slab)
            self._gate.notify_all()

    # -- the thread that sends ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._agree()
        while (found := self._next()) is not None:
            self._push(*found)
        self._memory.close()

    def _agree(self) -> None:
        """Find memory that the other end can read; without any, bodies travel with their notes."""
        for kind in self._kinds:
            with suppress(OSError):
                memory = kind.make()
                if self._offered(memory):
                    memory.found()
                    break
                memory.close()
        else:
            memory = SlabMemory()
        with self._gate:
            self._memory, self._free = memory, list(range(len(memory.slabs)))

    def _offered(self, memory: SlabMemory) -> bool:
        with self._gate:
            self._memory, self._taken = memory, None
        self._line.push(self.to, encode(MemoryOffer(memory.number, memory.kind, memory.about)), _NO_BODY, "")
        with self._gate:
            self._gate.wait_for(lambda: self._closed or self._taken is not None)
            return bool(self._taken)

    def _next(self) -> tuple[KvPacket, int, Bytes] | None:
        """The next packet, its slab and its body; None at the end."""
        while True:
            with self._gate:
                while not self._closed and not (self._queue and (self._free or not self._queue[0].size)):
                    self._gate.wait()
                if self._closed:
                    return None
                packet = self._queue[0]
                # The one that was read last is in the processor's cache.
                slab = self._free.pop() if packet.size else -1
            # `copy` takes the same lock: before slots are overwritten their packet has either left or been copied.
            with self._copying:
                with self._gate:
                    there = bool(self._queue) and self._queue[0] is packet
                    if there:
                        self._queue.popleft()
                if there:
                    return packet, slab, packet.into(self._memory.slabs[slab])
            self._give_back(slab)  # forgotten between the two locks

    def _push(self, packet: KvPacket, slab: int, body: Bytes) -> None:
        note = packet.note
        if isinstance(note, KvBody):
            note = replace(note, size=packet.size, memory=self._memory.number, slab=slab)
        body = body if not self._memory.kind else body[:0]
        self._line.push(self.to, encode(note), body.data, packet.save.request)

    def _give_back(self, slab: int) -> None:
        if slab >= 0:
            self.freed(SlabFree(self._memory.number, slab))


NO_SCOPE = ""
"""Scope of messages about memory, which are kept for as long as the connection."""


class _IncomingSlice:
    """A piece of which something has come."""

    __slots__ = ("began_s", "bodies")

    def __init__(self) -> None:
        self.began_s, self.bodies = time.monotonic(), 0


class _RequestPlace:
    """A request's place, and what has not come of it: `missing`, by layer, head and token, and how much that is. What
    comes twice counts once. `gate` is held while slots are written."""

    def __init__(self, place: KvPlace) -> None:
        self.place, self.slots = place, SlotRanges(place.runs)
        self.missing = np.ones((place.cache.shape[0], len(place.heads), place.tokens), dtype=bool)
        self.left = self.missing.size
        self.coming: dict[tuple[int, int], _IncomingSlice] = {}
        self.gate, self.closed = threading.Lock(), False

    def write(self, note: KvBody, body: Bytes) -> None:
        """Put a body into its slots. Raises ValueError where it does not fit."""
        place, positions = self.place, note.positions
        first, stop = note.heads
        if first < place.heads.start or stop > place.heads.stop or first >= stop:
            raise ValueError(f"KV heads {first} to {stop}, where {place.heads.start} to {place.heads.stop} are kept")
        here = len(positions) and positions.min() >= 0 and positions.max() < place.tokens
        if not 0 <= note.layer < len(place.cache) or not here:
            raise ValueError(f"layer {note.layer}, tokens up to {positions.max(initial=-1)} of {place.tokens}")
        rows = slice(first - place.heads.start, stop - place.heads.start)
        heads = place.cache[note.layer, :, rows]
        if body.nbytes != heads.shape[0] * heads.shape[1] * len(positions) * heads.shape[3]:
            raise ValueError(f"{body.nbytes} bytes for {len(positions)} tokens of {stop - first} heads")
        slots = self.slots.of(positions)
        found = slot_ranges_of(slots)
        if by_runs(len(slots), len(found)):
            spread(body, heads, found)
        else:
            scatter(body, heads, slots)
        missing = self.missing[note.layer, rows]
        self.left -= int(missing[:, positions].sum())
        missing[:, positions] = False


class ReceiveQueue:
    """The KV that one instance or rank receives. `wake` is called when there is something to `take`."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._gate = threading.Lock()
        self._boxes: dict[str, _RequestPlace] = {}
        self._ended: list[TransferEnd] = []

    def open(self, request: str, place: KvPlace) -> None:
        """Keep the KV that arrives for a request from now on."""
        with self._gate:
            self._boxes[request] = _RequestPlace(place)

    def close(self, request: str) -> None:
        """Drop further messages of the request. After return, no thread writes to its slots."""
        with self._gate:
            box = self._boxes.pop(request, None)
        if box is not None:
            with box.gate:
                box.closed = True

    def matched(self, request: str) -> int | None:
        """See `PeerConnector.get_num_new_matched_tokens`."""
        with self._gate:
            box = self._boxes.get(request)
        if box is None:
            return None
        whole = int(box.place.cache.shape[0]) * len(box.place.heads)
        # `left` counts (layer, head, token) units; a token with any unit missing is missing: rounded up.
        return box.place.tokens - -(-box.left // whole)

    def lose(self, source: int, why: str) -> None:
        """What one end had begun to send will not be whole."""
        with self._gate:
            boxes = list(self._boxes.items())
        for request, box in boxes:
            with box.gate:
                gone = [key for key in box.coming if key[1] == source]
                for key in gone:
                    del box.coming[key]
            if gone:
                self.fail(request, why, source)

    def fail(self, request: str, why: str, end: int | None = None) -> None:
        """Something of a request cannot be sent or received. end: of the peer that is gone, where it is that."""
        with self._gate:
            self._ended.append(SpanTaskLost(request, why, None if end is None else instance_of(end), transfer=True))
        self._wake()

    def take(self) -> list[TransferEnd]:
        """What has come to its end since the last call."""
        with self._gate:
            ended, self._ended = self._ended, []
        return ended

    # -- in the threads that write ------------------------------------------------------------------------------------

    def body(self, source: int, request: str, note: KvBody, body: Bytes) -> None:
        """Keep a body, unless the request is not awaited here."""
        with self._gate:
            box = self._boxes.get(request)
        if box is None:
            return
        with box.gate:
            if box.closed:
                return
            coming = box.coming.setdefault((note.piece, source), _IncomingSlice())
            try:
                box.write(note, body)
                coming.bodies += 1
                return
            except ValueError as error:
                why = f"{named(source)} has sent what cannot be kept: {error}"
        self.fail(request, why)

    def end(self, source: int, request: str, note: SliceEnd) -> bool:
        """A piece has no more bodies. Whether all of them are here."""
        with self._gate:
            box = self._boxes.get(request)
        if box is None:
            return False
        with box.gate:
            coming = box.coming.pop((note.piece, source), None) or _IncomingSlice()
            if box.closed:
                return False
        # Fewer than were sent: some went down with a connection, or before there was room for the request.
        if coming.bodies != note.bodies:
            self.fail(request, f"{coming.bodies} of {note.bodies} messages of {named(source)} have come")
            return False
        with self._gate:
            self._ended.append(KvArrived(request, note.piece, source, coming.began_s, time.monotonic()))
        self._wake()
        return True


class _AttachedMemory(NamedTuple):
    """The end's memory, of which it told over `line`."""

    number: int
    reader: SlabReader
    line: PeerStream


class SourceReader:
    """The thread that writes what one end has sent, in order. `line`: the present connection to the end; may raise
    PeerLostError. `tell(request, note)` tells it something."""

    def __init__(
        self,
        source: int,
        inbox: ReceiveQueue,
        kinds: Mapping[str, MemoryKind],
        line: Callable[[], PeerStream],
        tell: Callable[[str, Note], None],
    ) -> None:
        self._source, self._inbox, self._kinds, self._line, self._tell = source, inbox, kinds, line, tell
        self._memory: _AttachedMemory | None = None
        self._ends = False
        self._queue: SimpleQueue[tuple[str, Note, memoryview] | str | None] = SimpleQueue()
        self.add = self._queue.put
        """(request, note, body); or why a connection has ended."""
        self._thread = threading.Thread(target=self._run, name=f"KV from {source}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End it, behind what it writes now."""
        self._ends = True
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None and not self._ends:
            if isinstance(item, str):
                self._lose(item)
                continue
            request, note, body = item
            if isinstance(note, MemoryOffer):
                self._attach(note)
            elif isinstance(note, SliceEnd):
                if self._inbox.end(self._source, request, note):
                    self._tell(request, replace(note, kept=True))
            elif isinstance(note, KvBody):
                self._keep(request, note, body)
                self._tell(NO_SCOPE, SlabFree(note.memory, note.slab))

    def _attach(self, offer: MemoryOffer) -> None:
        try:
            kind, line = self._kinds.get(offer.kind), self._line()
        except PeerLostError:
            return
        self._detach()
        reader = None if kind is None else kind.attach(offer.about)
        self._memory = None if reader is None else _AttachedMemory(offer.memory, reader, line)
        self._tell(NO_SCOPE, SlabFree(offer.memory, taken=reader is not None))

    def _keep(self, request: str, note: KvBody, body: memoryview) -> None:
        if self._inbox.matched(request) is None:
            return
        if body.nbytes:
            self._inbox.body(self._source, request, note, np.frombuffer(body, dtype=np.uint8))
            return
        memory = self._memory
        try:
            if memory is None or memory.number != note.memory:
                raise OSError("the memory is not known")
            there = memory.reader.read(note.slab, note.size, lambda: self._check(memory.line))
        except (OSError, PeerLostError) as error:
            self._inbox.fail(request, f"what {named(self._source)} has sent cannot be read: {error}", self._source)
            return
        self._inbox.body(self._source, request, note, there)

    def _check(self, line: PeerStream) -> None:
        if self._ends:
            raise PeerLostError("this instance ends")
        line.check()

    def _lose(self, why: str) -> None:
        """A connection has ended, maybe an earlier one than that of the present memory."""
        if self._memory is not None:
            try:
                self._memory.line.check()
            except PeerLostError:
                self._detach()
        self._inbox.lose(self._source, why)

    def _detach(self) -> None:
        if self._memory is not None:
            self._memory.reader.close()
        self._memory = None


class PeerConnector:
    """One instance's connector, or that of one of its ranks, which then moves its own heads. Handles everything that is
    pushed to these peers. May be used from one thread, `get_finished` from another one; its own threads write into the
    pool.

    Instances may be cut by heads, each into its own number of ranks (`routes`): what is saved to an instance goes to
    those of its ranks that have heads of it, and a piece has come from an instance when it has come from all of its
    ranks that send here. So users know instances only."""

    def __init__(
        self,
        peers: PeerNetwork,
        wake: Callable[[], None],
        kinds: Sequence[MemoryKind],
        kv_heads: int,
        ranks: int = 1,
    ) -> None:
        """wake: called from any thread when `get_finished` has something. kinds: of memory that others may read, the
        preferred one first; all are understood. kv_heads: of the whole model. ranks: of this instance."""
        self._peers, self._kinds = peers, kinds
        self._kv_heads, self._rank, self._ranks = kv_heads, rank_of(peers.number), ranks
        self._inbox = ReceiveQueue(wake)
        self._gate = threading.Lock()
        self._outlets: dict[int, SendQueue] = {}
        self._sources: dict[int, SourceReader] = {}
        self._ways: dict[SaveKv, tuple[SendQueue, list[int]]] = {}
        self._come: dict[tuple[str, int, int], dict[int, KvArrived]] = {}
        peers.handle(self._handle)
        peers.on_lost(self._lose)

    # -- the scheduler's side -----------------------------------------------------------------------------------------

    def update_state_after_alloc(self, request: str, place: KvPlace) -> None:
        """Reserve slots for the KV of a request: received KV is written there until `forget`."""
        self._inbox.open(request, place)

    def get_num_new_matched_tokens(self, request: str) -> int | None:
        """Return how many of the request's reserved tokens have all their KV; None if nothing is reserved."""
        return self._inbox.matched(request)

    def forget(self, request: str) -> None:
        """Nothing of a request is to be sent any more. Nothing of it is written here any more once this has returned:
        its slots may be given away."""
        self._inbox.close(request)
        for outlet in self._all():
            outlet.forget(request)
        for save in [save for save in self._ways if save.request == request]:
            del self._ways[save]
        with self._gate:
            for key in [key for key in self._come if key[0] == request]:
                del self._come[key]

    # -- the worker's side --------------------------------------------------------------------------------------------

    def save_kv_layer(self, save: SaveKv, layer: int, part: KvPart) -> None:
        """KV of a layer is there and may be sent. Returns at once; slots stay as they are until `wait_for_save`."""
        for end, heads in self._ends_of(save.to):
            start, stop = max(heads.start, part.heads.start), min(heads.stop, part.heads.stop)
            if start < stop:
                one, row = save._replace(to=end), part.row + start - part.heads.start
                outlet, bodies = self._way(one)
                packets = list(packets_of(one, layer, dataclasses.replace(part, heads=range(start, stop), row=row)))
                bodies[0] += len(packets)
                outlet.add(one, packets)

    def finish_save(self, save: SaveKv) -> None:
        """All that the movement has from here has been given to `save_kv_layer`, maybe nothing."""
        for end, _ in self._ends_of(save.to):
            one = save._replace(to=end)
            outlet, bodies = self._way(one)
            del self._ways[one]
            outlet.add(one, [KvPacket(one, SliceEnd(save.piece, bodies[0]))])

    def wait_for_save(self, request: str) -> None:
        """Return when slots of a request may be overwritten: what has not been sent yet has been copied. Never waits
        for another instance."""
        for outlet in self._all():
            outlet.copy(request)

    def get_finished(self) -> list[TransferEnd]:
        """What has come to its end since the last call."""
        whole: list[TransferEnd] = []
        for one in self._inbox.take():
            if isinstance(one, SpanTaskLost):
                whole.append(one)
                continue
            instance = instance_of(one.source)
            key = (one.id, one.piece, instance)
            with self._gate:
                if self._inbox.matched(one.id) is None:  # forgotten since it came
                    continue
                # By rank: a slice is complete once every source rank that sends here has reported its part.
                come = self._come.setdefault(key, {})
                come[rank_of(one.source)] = one
                found = routes(self._kv_heads, self._peers.ranks_of(instance), self._ranks)
                if come.keys() < {rank for rank, target in found if target == self._rank}:
                    continue
                del self._come[key]
            whole.append(replace(one, source=instance, began_s=min(each.began_s for each in come.values())))
        return whole

    def shutdown(self) -> None:
        """End its threads. The pool is not touched any more."""
        for outlet in self._all():
            outlet.close()
        for source in self._sources.values():
            source.close()

    def _ends_of(self, instance: int) -> list[tuple[int, range]]:
        """The ends of an instance to which something goes from here, with its heads."""
        found = routes(self._kv_heads, self._ranks, self._peers.ranks_of(instance))
        return [(end_of(instance, target), heads) for (rank, target), heads in found.items() if rank == self._rank]

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


class _HomeLine(SendLine):
    """To this end itself: it gathers KV of which it holds a part."""

    def __init__(self, handle: Callable[[int, str, bytes, memoryview], None], number: int) -> None:
        self._handle, self._number = handle, number

    @override
    def push(self, to: int, note: bytes, body: memoryview, scope: str) -> None:
        self._handle(self._number, scope, note, body)

    def check(self) -> None:
        """It is always there."""


class _NoLine(SendLine):
    """To an end that is not there."""

    def __init__(self, why: str, to: int) -> None:
        self._why, self._to = why, to

    @override
    def push(self, to: int, note: bytes, body: memoryview, scope: str) -> None:
        pass

    def check(self) -> None:
        """Raises PeerLostError."""
        raise PeerLostError(self._why, self._to)
