"""The connector `nixl`: NVIDIA's NIXL reads bodies out of the sender's registered memory (by RDMA, where there is any).

As `peer_connector`, but where a body lies, and not the body, is pushed over the peers' sockets; a thread of the
receiver reads it (UCX) into memory of its own, puts it into the slots, and says that it was read. So a pool need not be
registered, and slots are written by this process alone: what was forgotten is not written, whatever the network does.

Needs `pip install 'headway[nixl]'`. NIXL's agent polls in a thread of its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from queue import SimpleQueue
from secrets import randbits
from typing import Any, NamedTuple
from uuid import uuid4

import msgspec
import numpy as np

from headway.core.errors import ConfigError
from headway.runtime.kv_transfer.body_notes import END, decode
from headway.runtime.kv_transfer.connection import SMALL
from headway.runtime.kv_transfer.peer_connector import PeerConnector, RemoteRoute
from headway.runtime.kv_transfer.peers import (
    PeerLostError,
    PeerNetwork,
    PeerStream,
    ReceivePlace,
    SendRoom,
    TransferCompletion,
)
from headway.runtime.kv_transfer.rank_routes import named
from headway.runtime.kv_transfer.ring_buffer import RingBuffer, RingReader, most
from headway.runtime.kv_transfer.send_queue import TransferRoute
from headway.runtime.kv_transfer.shared_buffer import Memory

_ARENA_BYTES = 8 << 20
_POLL_S = 50e-6
_ALL = ""
"""The scope of what is said here: it is never forgotten, so that all that leaves is counted."""


class BodyLocation(msgspec.Struct, frozen=True, array_like=True, tag="lies"):
    """A body of a request lies at `address` of an agent that is described by `agent`; `note` is what it is. `life`: a
    number by which `BodiesRead` names the connection."""

    request: str
    note: bytes
    address: int
    length: int
    agent: bytes
    life: int


class BodiesRead(msgspec.Struct, frozen=True, array_like=True, tag="read"):
    """So many bodies of a connection have been read in all."""

    life: int
    messages: int


_decoder: msgspec.msgpack.Decoder[BodyLocation | BodiesRead] = msgspec.msgpack.Decoder(BodyLocation | BodiesRead)
_encode = msgspec.msgpack.Encoder().encode


class NixlAgent:
    """NIXL's. Raises ConfigError where it has no UCX."""

    def __init__(self, name: str) -> None:
        try:
            api = import_module("nixl._api")
            self._agent: Any = api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"]))
        except Exception as error:  # it has its own for each
            raise ConfigError(f"kv_connector 'nixl': {type(error).__name__}: {error}") from None
        self._gate = threading.Lock()
        self._others: dict[bytes, Any] = {}

    def memory(self, size: int) -> tuple[Memory, bytes]:
        """Memory that others may read, and what they have to know of this agent to do so."""
        made = np.zeros(size, dtype=np.uint8)
        with self._gate:
            self._agent.register_memory([(made.ctypes.data, size, 0, "")], "DRAM")
            return made, bytes(self._agent.get_agent_metadata())

    def read(self, other: bytes, address: int, into: Memory, check: Callable[[], None]) -> None:
        """Another agent's memory, into memory of this one. `check` is called while that goes on. Raises OSError, and
        what `check` does."""
        try:
            with self._gate:
                if other not in self._others:
                    self._others[other] = self._agent.add_remote_agent(other)
                here = self._agent.get_xfer_descs([(into.ctypes.data, into.nbytes, 0)], "DRAM")
                there = self._agent.get_xfer_descs([(address, into.nbytes, 0)], "DRAM")
                handle = self._agent.initialize_xfer("READ", here, there, self._others[other])
                state = self._agent.transfer(handle)
            try:
                while state == "PROC":
                    check()
                    time.sleep(_POLL_S)
                    with self._gate:
                        state = self._agent.check_xfer_state(handle)
            finally:
                with self._gate:
                    self._agent.release_xfer_handle(handle)
        except PeerLostError:
            raise
        except Exception as error:  # NIXL has its own for each
            raise OSError(f"{type(error).__name__}: {error}") from None
        if state != "DONE":
            raise OSError(f"NIXL: {state}")

    def forget(self, other: bytes) -> None:
        """Nothing is read of another agent for now. Harmless when it is not known."""
        with self._gate:
            name = self._others.pop(other, None)
            if name is not None:
                with suppress(Exception):  # it has its own for each; what is known of it costs some memory
                    self._agent.remove_remote_agent(name)


class _StreamMemory(SendRoom):
    """Memory of a lane."""

    __slots__ = ()


class _ReadableStream:
    """What the other end of one connection may read. `line`: over that connection."""

    def __init__(self, line: PeerStream, to: int, life: int, memory: Memory, agent: bytes) -> None:
        self.life = life
        self._line, self._to, self._memory, self._agent = line, to, memory, agent
        self._gate = threading.Lock()
        self._wake = RingBuffer(memory.nbytes)
        self._again: set[Callable[[], None]] = set()

    def ended(self) -> bool:
        """Whether the connection has."""
        try:
            self._line.check()
        except PeerLostError:
            return True
        return False

    def takes(self, size: int) -> bool:
        """Whether bodies of so many bytes go this way."""
        return SMALL <= size <= most(self._memory.nbytes) and not self.ended()

    def room(self, size: int, again: Callable[[], None]) -> SendRoom | None:
        """See `TransferRoute.room`."""
        with self._gate:
            taken = self._wake.take(size)
            if taken is None:
                self._again.add(again)
        if taken is None:
            # Also registered with the connection: where that never comes up, its end reaches no other waiter.
            self._line.room(self._to, 0, self.rouse)
            return None
        return _StreamMemory(self._memory[taken.at : taken.at + size], taken)

    def push(self, request: str, note: bytes, room: _StreamMemory) -> TransferCompletion:
        """Say where a body lies."""
        said = BodyLocation(request, note, int(room.view.ctypes.data), room.view.nbytes, self._agent, self.life)
        with self._gate:  # in the order in which they are read
            if room.taken is not None:
                self._wake.leave(room.taken)
            return self._line.push(self._to, _encode(said), ())

    def drop(self, room: _StreamMemory) -> None:
        """Nothing is read there."""
        with self._gate:
            if room.taken is not None:
                self._wake.drop(room.taken)
        self.rouse()

    def read(self, messages: int) -> None:
        """The other end has read so many; what cannot be is ignored."""
        with self._gate, suppress(ValueError):
            self._wake.read(messages)
        self.rouse()

    def rouse(self) -> None:
        """There may be room, or no need of any."""
        with self._gate:
            waiting, self._again = self._again, set()
        for again in waiting:
            again()


class _NixlRoute(RemoteRoute):
    """To another end, by a lane for all that it takes."""

    def __init__(self, line: PeerStream, to: int, lane: _ReadableStream) -> None:
        super().__init__(line, to)
        self._lane = lane

    def room(self, size: int, again: Callable[[], None]) -> SendRoom | None:
        if self._lane.takes(size):
            room = self._lane.room(size, again)
            if room is not None or not self._lane.ended():
                return room
        return super().room(size, again)

    def push(self, note: bytes, room: SendRoom) -> TransferCompletion:
        if isinstance(room, _StreamMemory):
            return self._lane.push(self._line.scope, note, room)
        return super().push(note, room)

    def drop(self, room: SendRoom) -> None:
        if isinstance(room, _StreamMemory):
            self._lane.drop(room)
        else:
            super().drop(room)


class _AnnouncedBody(NamedTuple):
    """Something said by another end, over `line`; None: that was cut at once."""

    said: BodyLocation | tuple[str, bytes]
    line: PeerStream | None


class _NixlReader:
    """The thread that reads what lies at one other end, in order."""

    def __init__(self, number: int, take: Callable[[int, _AnnouncedBody], None]) -> None:
        self._number, self._take = number, take
        self._queue: SimpleQueue[_AnnouncedBody | None] = SimpleQueue()
        self.add = self._queue.put
        self._thread = threading.Thread(target=self._run, name=f"NIXL from {number}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End it, behind what it reads now."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (lying := self._queue.get()) is not None:
            self._take(self._number, lying)


class NixlConnector(PeerConnector):
    """See `KvConnector`. ConfigError where NIXL is not to be had."""

    def __init__(self, peers: PeerNetwork, wake: Callable[[], None]) -> None:
        self._agent = NixlAgent(f"headway {peers.number} {uuid4().hex}")
        self._lanes: dict[int, tuple[_ReadableStream, Memory, bytes]] = {}
        self._sources: dict[int, _NixlReader] = {}
        self._readers: dict[int, tuple[int, RingReader]] = {}
        self._agents: dict[int, bytes] = {}
        self._aside: dict[int, Memory] = {}
        self._spoilt: list[Memory] = []
        self._writes, self._ends = threading.Lock(), threading.Event()
        super().__init__(peers, wake)

    def forget(self, request: str) -> None:
        super().forget(request)
        # Wait for a body that is being written now; the next one finds the request forgotten.
        with self._writes:
            pass

    def shutdown(self) -> None:
        super().shutdown()
        self._ends.set()
        for source in list(self._sources.values()):
            source.close()

    # -- on the way out -----------------------------------------------------------------------------------------------

    def _there(self, request: str, to: int) -> TransferRoute:
        return _NixlRoute(self._peers.line(request, (to,)), to, self._lane(to))

    def _lane(self, to: int) -> _ReadableStream:
        """What an end may read now: another connection, another lane; its memory stays."""
        lane, memory, agent = self._lanes.get(to) or (None, *self._agent.memory(_ARENA_BYTES))
        if lane is None or lane.ended():
            lane = _ReadableStream(self._peers.line(_ALL, (to,)), to, randbits(63), memory, agent)
            self._lanes[to] = (lane, memory, agent)
        return lane

    # -- in the threads that read the peers' sockets ------------------------------------------------------------------

    def _handle(self, source: int, request: str, said: bytes, length: int) -> ReceivePlace | None:
        if request != _ALL:
            with suppress(msgspec.DecodeError):
                if source in self._sources and decode(said).layer == END:  # behind all that it is the end of
                    self._hand(source, (request, said))
                    return None
            return super()._handle(source, request, said, length)
        try:
            word = _decoder.decode(said)
        except msgspec.DecodeError:
            return None
        if isinstance(word, BodiesRead):
            lane = self._lanes.get(source)
            if lane is not None and lane[0].life == word.life:
                lane[0].read(word.messages)
            return None
        if source not in self._sources:
            self._sources[source] = _NixlReader(source, self._take)
        self._hand(source, word)
        return None

    def _hand(self, source: int, said: BodyLocation | tuple[str, bytes]) -> None:
        line = None
        with suppress(PeerLostError):
            line = self._peers.line(_ALL, (source,))
        self._sources[source].add(_AnnouncedBody(said, line))

    def _lose(self, instance: int, why: str) -> None:
        super()._lose(instance, why)
        lane = self._lanes.get(instance)
        if lane is not None:
            lane[0].rouse()

    # -- in the threads that read memory ------------------------------------------------------------------------------

    def _take(self, source: int, lying: _AnnouncedBody) -> None:
        said = lying.said
        if not isinstance(said, BodyLocation):
            request, note = said
            with self._writes:
                place = super()._handle(source, request, note, 0)
                if place is not None:
                    place.complete()
            return
        if not self._ends.is_set() and self._inbox.matched(said.request) is not None:
            try:
                self._read(source, said, lying.line)
            except (OSError, PeerLostError, msgspec.DecodeError) as error:
                self._inbox.fail(said.request, f"what {named(source)} has sent cannot be read: {error}", source)
        life, reader = self._readers.get(source, (-1, RingReader(0)))
        if life != said.life:
            reader = RingReader(_ARENA_BYTES)
            self._readers[source] = (said.life, reader)
        if reader.read(said.length):
            with suppress(PeerLostError):
                self._peers.push(source, _ALL, _encode(BodiesRead(said.life, reader.messages)), ())

    def _read(self, source: int, said: BodyLocation, line: PeerStream | None) -> None:
        def check() -> None:
            if line is None or self._ends.is_set():
                raise PeerLostError("it is gone")
            line.check()

        if said.length > most(_ARENA_BYTES):
            raise OSError(f"{said.length} bytes, of at most {most(_ARENA_BYTES)}")
        check()
        known = self._agents.get(source)
        # Another incarnation, or the same with more registered memory: NIXL keeps one description per agent.
        if known is not None and known != said.agent:
            self._agent.forget(known)
        self._agents[source] = said.agent
        if source not in self._aside:
            self._aside[source], _ = self._agent.memory(most(_ARENA_BYTES))
        aside = self._aside[source][: said.length]
        try:
            self._agent.read(said.agent, said.address, aside, check)
        except (OSError, PeerLostError):
            # The abandoned read may still write here: keep the memory alive, and never use it again.
            self._spoilt.append(self._aside.pop(source))
            raise
        with self._writes:
            place = self._inbox.handle(source, said.request, decode(said.note), said.length)
            if place is not None:
                if place.write is not None:
                    place.write(aside)
                place.complete()
