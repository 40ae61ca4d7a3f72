"""What one end has sent is written into its slots by a thread of its own, so that no other end waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np

from headway.runtime.kv_transfer.body_notes import (
    KvBody,
    MemoryAnswer,
    MemoryOffer,
    Note,
    SlabFree,
    SliceEnd,
    SliceKept,
)
from headway.runtime.kv_transfer.peers import PeerLostError, PeerStream
from headway.runtime.kv_transfer.rank_routes import named
from headway.runtime.kv_transfer.receive_queue import ReceiveQueue
from headway.runtime.kv_transfer.slab_memory import MemoryKind, SlabReader

NO_SCOPE = ""
"""Of what ends say about memory: it is never forgotten."""


class _AttachedMemory(NamedTuple):
    """The end's memory, of which it told over `line`."""

    number: int
    reader: SlabReader
    line: PeerStream


class SourceReader:
    """`line`: the present connection to the end; may raise PeerLostError. `tell(request, note)` tells it something."""

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
                    self._tell(request, SliceKept(note.piece))
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
        self._tell(NO_SCOPE, MemoryAnswer(offer.memory, reader is not None))

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
