"""Write-ahead journal of accepted requests and their output, from which a new server process resumes them.

The file is a sequence of frames: the folder's marker (8 random bytes), a state, the payload's length, CRC-32 of length
and payload, payload. A damaged frame costs that one record: reading goes on at the next marker. A lost output record
leaves a gap in its request's numbering; output behind the gap is dropped, and computed again. A request ends by its
frame's state, which is overwritten in place, so that this needs no room on a full disk.

A file with anything but whole frames is kept under another name before it is rewritten. It is rewritten without ended
requests when it is opened, and when ended requests take more than `slack_bytes` of it: another thread copies what is
live, so that no token waits for that.

SQLite in WAL mode was tried in its place, and is not used. One flipped bit in its log dropped all frames behind it: 18
of 20 accepted requests, where one record is lost here. A commit that is on the disk took 8 ms and held up each token
behind it, so that the writer's thread, its syncs and its waiting lines stay; a failed fsync counts as good the next
time; and its calls cannot be made to fail one by one in a test.
"""

from __future__ import annotations

import asyncio
import logging
import os
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec

from headway.core.errors import ConfigError, UnavailableError
from headway.core.files import PrivateFolder
from headway.core.request import SamplingParams, Slo
from headway.runtime.engine.protocol import OutputDelta
from headway.serving.jobs import GenerationJob, TextOptions, TokenPrompt

MARKER_BYTES = 8
"""Length of the marker that begins every frame of the journal (`journal`)."""


class JournalFolder(PrivateFolder):
    """A `PrivateFolder` with a marker. ours: beginnings of the names of the journal's files."""

    def __init__(self, path: Path, ours: tuple[str, ...]) -> None:
        super().__init__(path, ours, "--journal")

    def keep(self, name: str, copy: str) -> None:
        """Give a file a second name, under which it stays when the first is replaced."""
        os.link(name, copy, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor, follow_symlinks=False)

    def marker(self) -> bytes:
        """Return the folder's marker, drawn once: no client knows it, so no prompt can contain it."""
        found = os.pread(self._lock, MARKER_BYTES, 0)
        if len(found) == MARKER_BYTES:
            return found
        self.set_marker(os.urandom(MARKER_BYTES))
        return self.marker()

    def set_marker(self, marker: bytes) -> None:
        """Replace the folder's marker."""
        os.pwrite(self._lock, marker, 0)
        os.fsync(self._lock)


log = logging.getLogger("headway.server")

_FILE, _FRESH, _DAMAGED = "requests.journal", "requests.new", "requests.damaged-"
# Frame header behind the marker: state, payload length in bytes, CRC-32 of length and payload; little-endian.
_HEAD = struct.Struct("<cII")
_LENGTH = struct.Struct("<I")
_LIVE, _ENDED = b"L", b"E"
_SCHEMA = 2


class JournalOpened(msgspec.Struct, frozen=True, array_like=True, tag="o"):
    """First two records of a file (a copy for the case of damage): its format and the model of its token ids."""

    schema: int
    model: str = ""
    """Name and size of the model; empty until the engine has started."""


class RequestAccepted(msgspec.Struct, frozen=True, array_like=True, tag="a"):
    """A client's request was accepted."""

    number: int
    id: str
    """The client's `X-Request-Id`, or one made by the server: a label, which several requests may have."""
    owner: str
    """Who may read and delete it (`identity.owner`)."""
    at_s: float
    """Time of acceptance, Unix seconds: a monotonic clock does not survive a reboot."""
    job: bytes
    """A `journaled_request._JournaledJob`, encoded."""
    prompts: tuple[bytes, ...]
    """Token ids, int32, little-endian."""
    key: str = ""
    """The server's own id (`identity.own_id`); empty in files of earlier versions."""


class OutputRecorded(msgspec.Struct, frozen=True, array_like=True, tag="t"):
    """Output of prompt `index` of a request."""

    number: int
    index: int
    at: int
    """Records of that prompt's output before this one."""
    delta: OutputDelta


Record = JournalOpened | RequestAccepted | OutputRecorded

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)


@dataclass(slots=True)
class JournalEntry:
    """A request that has not ended."""

    accepted: RequestAccepted
    outputs: list[list[OutputDelta]] = field(default_factory=list)
    """Recorded output, by prompt, in order."""


@dataclass(slots=True)
class _JournalPosition:
    """Where a live request is in the file."""

    frame: int
    """Offset of the frame of its `RequestAccepted`."""
    size: int
    """Bytes of all its frames."""
    written: list[int]
    """Output records, by prompt."""


@dataclass(frozen=True, slots=True)
class _JournalFrame:
    begin: int
    end: int
    ended: bool
    record: Record


class RequestJournal:
    """The journal in a folder, which is created when missing. Used by one thread at a time (`JournalWriter`).

    Raises ConfigError when another server has the folder locked, and for a folder that cannot be used.
    """

    def __init__(self, folder: Path, slack_bytes: int = 64 << 20) -> None:
        # Bytes of ended requests that trigger a rewrite; `_allowed_bytes` grows after a rewrite that failed.
        self._slack_bytes = self._allowed_bytes = slack_bytes
        self._path = folder / _FILE
        self._folder = JournalFolder(folder, (_FILE, _FRESH, _DAMAGED))
        self._opened = JournalOpened(_SCHEMA)
        # Requests that an earlier process accepted and did not end, by number.
        self.unfinished: dict[int, JournalEntry] = {}
        self._places: dict[int, _JournalPosition] = {}
        self._size = self._live_bytes = 0
        self._next = 1
        self._file = -1
        self._closed = False
        # Held around a change of `_file`, which `sync` reads on another thread.
        self._guard = threading.Lock()
        try:
            self._marker = self._folder.marker()
            self._load()
        except OSError as error:
            self._folder.close()
            raise ConfigError(f"--journal {folder}: {error.strerror}; make room or give another folder") from error
        except BaseException:
            self._folder.close()
            raise

    def belongs_to(self, model: str) -> None:
        """Bind the journal to a model, once it is known. Raises ConfigError when unfinished requests are of another."""
        if self._opened.model not in ("", model) and self.unfinished:
            raise ConfigError(
                f"{self._path} holds {len(self.unfinished)} unfinished requests of {self._opened.model}, and this "
                f"server has {model}: serve that model, or give another --journal"
            )
        if self._opened.model != model:
            self._opened = JournalOpened(_SCHEMA, model)
            self._rewrite(self._folder.read(_FILE))

    def accept(
        self, request_id: str, job: bytes, prompts: Sequence[bytes | memoryview], owner: str = "", key: str = ""
    ) -> int:
        """Record an accepted request; return its number in this journal. Raises OSError."""
        number, self._next = self._next, self._next + 1
        record = RequestAccepted(number, request_id, owner, time.time(), job, tuple(map(bytes, prompts)), key)
        begin = self._size
        size = self._append(record)
        self._places[number] = _JournalPosition(begin, size, [0] * len(prompts))
        self._live_bytes += size
        return number

    def write_output(self, number: int, index: int, delta: OutputDelta) -> None:
        """Record output; called before it is sent to the client.

        Does nothing for a request that has ended. Raises OSError when the record cannot be written; earlier records
        stay intact.
        """
        place = self._places.get(number)
        if place is not None:
            size = self._append(OutputRecorded(number, index, place.written[index], delta))
            place.size += size
            self._live_bytes += size
            place.written[index] += 1

    def end(self, number: int) -> None:
        """Record that a request has ended. Idempotent. Needs no room on the disk."""
        place = self._places.get(number)
        if place is None or self._closed:
            return
        os.pwrite(self._file, _ENDED, place.frame + MARKER_BYTES)
        del self._places[number]
        self._live_bytes -= place.size
        self.unfinished.pop(number, None)

    @property
    def compaction_due(self) -> bool:
        """Whether ended requests take so much of the file that it should be written anew."""
        return self._size - self._live_bytes > self._allowed_bytes

    def copy_live(self) -> JournalCopy:
        """Begin a new file with what is live. Another thread calls `JournalCopy.write`, then `adopt` follows."""
        return JournalCopy(self._folder, self._marker, 2 * self._framed(self._opened), self._size, set(self._places))

    def adopt(self, copy: JournalCopy) -> None:
        """Add to the copy what came meanwhile, and let it be the journal. On OSError the old file stays in use."""
        try:
            data = os.pread(self._file, self._size - copy.until, copy.until)
            copy.add(data, set(self._places))
            for number in copy.places.keys() - self._places.keys():
                os.pwrite(copy.file, _ENDED, copy.places.pop(number).frame + MARKER_BYTES)
            os.fsync(copy.file)
            self._folder.replace(_FRESH, _FILE)
        except BaseException:
            copy.close()
            raise
        if lost := self._places.keys() - copy.places.keys():
            log.error("%s has lost %d requests, which a restart would not take up again", self._path, len(lost))
            for number in lost:
                del self._places[number]
        self._allowed_bytes = self._slack_bytes
        self._swap(copy)

    def copy_failed(self, error: OSError) -> None:
        """Go on with the old file until ended requests take `slack_bytes` more: each copy reads all of it."""
        self._allowed_bytes += self._slack_bytes
        log.warning("%s cannot be written anew without what has ended: %s", self._path, error.strerror)

    def shrink(self) -> None:
        """Give back the room of ended requests where none is live: needs no room on the disk. Raises OSError."""
        header = 2 * len(self._framed(self._opened))
        if not self._places and self._size > header:
            os.ftruncate(self._file, header)
            self._size = header
            self._live_bytes = 0

    def check_room(self, size: int) -> None:
        """Raise OSError unless `size` more bytes can be written."""
        try:
            _write(self._file, bytes(size), self._size)
        finally:
            os.ftruncate(self._file, self._size)

    def sync(self) -> None:
        """Return when all that was written is on the disk. May be called while another thread writes."""
        # A duplicate, because a rewrite may close the original meanwhile.
        with self._guard:
            copy = os.dup(self._file)
        try:
            os.fsync(copy)
        finally:
            os.close(copy)

    def close(self) -> None:
        """Stop writing; unfinished requests are left to the next server. Idempotent."""
        if self._closed:
            return
        self._closed = True
        with suppress(OSError):
            os.fsync(self._file)
        os.close(self._file)
        self._folder.close()

    # -- the file -----------------------------------------------------------------------------------------------

    def _append(self, record: Record) -> int:
        """Append the whole record and return its size, or raise OSError and append nothing."""
        if self._closed:
            return 0
        frame = self._framed(record)
        try:
            _write(self._file, frame, self._size)
        except OSError:
            os.ftruncate(self._file, self._size)
            raise
        self._size += len(frame)
        return len(frame)

    def _framed(self, record: Record) -> bytes:
        payload = _encoder.encode(record)
        return self._marker + _HEAD.pack(_LIVE, len(payload), _checksum(payload)) + payload

    def _load(self) -> None:
        """Read the file of an earlier process, then rewrite it with the unfinished requests only."""
        data = self._folder.read(_FILE)
        first = data[:MARKER_BYTES]
        # The lock file may be damaged or lost: the file's own frames have the marker too.
        if len(first) == MARKER_BYTES and data.count(first) > data.count(self._marker):
            self._marker = first
            self._folder.set_marker(first)
        whole = places = at = 0
        for frame in _frames(data, self._marker):
            whole += frame.end - frame.begin
            places += frame.begin > at
            at = frame.end
            self._take(frame)
        places += len(data) > at
        if whole < len(data):
            self._keep_damaged(places, len(data) - whole)
        # Sizes and places are counted by the rewrite.
        self._places = {
            number: _JournalPosition(0, 0, [len(said) for said in entry.outputs])
            for number, entry in self.unfinished.items()
        }
        self._rewrite(b"".join(self._unfinished_frames()))

    def _take(self, frame: _JournalFrame) -> None:
        """Take one record of the file into `unfinished`."""
        record = frame.record
        if isinstance(record, JournalOpened):
            self._opened = record
            if record.schema != _SCHEMA:
                raise ConfigError(f"{self._path} is of schema {record.schema}; this version reads {_SCHEMA}")
        elif isinstance(record, RequestAccepted):
            # Numbers go on after the largest in the file, those of ended requests included.
            self._next = max(self._next, record.number + 1)
            if not frame.ended:
                self.unfinished[record.number] = JournalEntry(record, [[] for _ in record.prompts])
        elif record.number in self.unfinished:
            said = self.unfinished[record.number].outputs[record.index]
            # A record before it was lost: what is behind the gap is computed again.
            if record.at == len(said):
                said.append(record.delta)

    def _keep_damaged(self, places: int, size: int) -> None:
        kept = f"{_DAMAGED}{int(time.time() * 1000)}"
        self._folder.keep(_FILE, kept)
        fields = {"file": str(self._path), "places": places, "bytes": size, "kept_as": kept}
        log.warning("the journal is damaged: whole records are used, others dropped", extra={"fields": fields})

    def _unfinished_frames(self) -> Iterator[bytes]:
        """Yield the frames of `unfinished`."""
        for number, entry in self.unfinished.items():
            yield self._framed(entry.accepted)
            for index, said in enumerate(entry.outputs):
                for at, delta in enumerate(said):
                    yield self._framed(OutputRecorded(number, index, at, delta))

    def _rewrite(self, live: bytes) -> None:
        """Write frames of live requests to a new file, then replace the old one. On OSError the old stays in use."""
        copy = JournalCopy(self._folder, self._marker, 2 * self._framed(self._opened), 0, set())
        try:
            copy.begin()
            copy.add(live, set(self._places))
            os.fsync(copy.file)
            # fsync before the rename: otherwise a crash could leave the final name with empty contents.
            self._folder.replace(_FRESH, _FILE)
        except BaseException:
            copy.close()
            raise
        self._swap(copy)

    def _swap(self, copy: JournalCopy) -> None:
        for number, place in copy.places.items():
            place.written = self._places[number].written
        self._size, self._places = copy.size, copy.places
        self._live_bytes = sum(place.size for place in copy.places.values())
        with self._guard:
            old, self._file = self._file, copy.file
            if old >= 0:
                os.close(old)


class JournalCopy:
    """A new file of a journal: header and frames of live requests. `until`: bytes of the old file that it covers."""

    def __init__(self, folder: JournalFolder, marker: bytes, header: bytes, until: int, live: set[int]) -> None:
        self._folder, self._marker, self._header, self._live = folder, marker, header, live
        self.until = until
        self.file = -1
        self.size = 0
        self.places: dict[int, _JournalPosition] = {}

    def begin(self) -> None:
        """Make the file. Raises OSError."""
        self._folder.remove(_FRESH)
        self.file = self._folder.open(_FRESH, os.O_CREAT | os.O_EXCL | os.O_RDWR)
        _write(self.file, self._header, 0)
        self.size = len(self._header)

    def write(self) -> None:
        """Make the file with what is live of the old one, and bring it to the disk. Raises OSError."""
        try:
            self.begin()
            self.add(self._folder.read(_FILE)[: self.until], self._live)
            os.fsync(self.file)
        except BaseException:
            self.close()
            raise

    def add(self, data: bytes, live: set[int]) -> None:
        """Append the frames of live requests in a part of the old file. Raises OSError."""
        for frame in _frames(data, self._marker):
            record = frame.record
            if isinstance(record, JournalOpened) or record.number not in live:
                continue
            content = data[frame.begin : frame.end]
            _write(self.file, content, self.size)
            # The first frame of a request is the one that says it was accepted.
            place = self.places.setdefault(record.number, _JournalPosition(self.size, 0, []))
            place.size += len(content)
            self.size += len(content)

    def close(self) -> None:
        """Drop the file. Idempotent."""
        if self.file >= 0:
            os.close(self.file)
            self.file = -1
        with suppress(OSError):
            self._folder.remove(_FRESH)


def _checksum(payload: bytes | memoryview) -> int:
    return zlib.crc32(payload, zlib.crc32(_LENGTH.pack(len(payload))))


def _frames(data: bytes, marker: bytes) -> Iterator[_JournalFrame]:
    """Yield the whole frames of a file, in order, whatever is between them."""
    view, at = memoryview(data), data.find(marker)
    while at >= 0:
        begin = at + len(marker) + _HEAD.size
        at, found = data.find(marker, at + 1), at
        if begin > len(data):
            return
        state, length, checksum = _HEAD.unpack_from(data, begin - _HEAD.size)
        payload = view[begin : begin + length]
        if len(payload) < length or _checksum(payload) != checksum:
            continue
        with suppress(msgspec.DecodeError):
            yield _JournalFrame(found, begin + length, state == _ENDED, _decoder.decode(payload))
            at = data.find(marker, begin + length)


def _write(file: int, data: bytes, at: int) -> None:
    view = memoryview(data)
    while view:
        # A write may take less than it was given, on a nearly full disk for example.
        done = os.pwrite(file, view, at)
        view, at = view[done:], at + done


# The journal's thread: records are written off the event loop, and the disk may be full for a while.
#
# Every record is written before what it says leaves the server. An accepted request is on the disk (fsync) before it
# goes to the engine; several that come together share one fsync. Output is on the disk a second later: what a crash of
# the machine takes of it is computed again.

_SYNC_S = 1.0
_RETRY_S = 0.5
_ROOM_BYTES = 256 << 10
"""Room that must be there before a disk no longer counts as full."""
_MOST_KEPT = 100_000
"""Output records that are kept in memory while the disk is full. Of a request that loses one, none is written again."""


class JournalWriter:
    """Access to a journal from the event loop. Made and closed there."""

    def __init__(self, journal: RequestJournal, where: str) -> None:
        self._journal = journal
        self._where = where
        # Why nothing can be written at present; None: all is well. Written by the thread.
        self.problem: str | None = None
        self._queue: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._closed = False
        # Of the thread only, from here: output that a full disk refused, requests of which some was given up, and ends
        # that could not be written.
        self._kept: deque[tuple[int, int, OutputDelta]] = deque()
        self._given_up: set[int] = set()
        self._unended: set[int] = set()
        self._synced_s = time.monotonic()
        self._dirty = False
        # After a failed fsync the system holds pages for clean that are not: only a new file is sure.
        self._unsure = False
        self._copying: Future[JournalCopy] | None = None
        self._unsynced: list[tuple[Future[int], int]] = []
        self._syncing: Future[None] | None = None
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="headway-journal-sync")
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="headway-journal-copy")
        self._thread = threading.Thread(target=self._run, name="headway-journal", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise UnavailableError while new requests cannot be recorded."""
        if self.problem is not None:
            raise UnavailableError(
                f"the journal's disk takes nothing more ({self._where}: {self.problem}); what was accepted goes on", 5.0
            )

    async def accept(
        self, request_id: str, job: bytes, prompts: Sequence[bytes | memoryview], owner: str, key: str = ""
    ) -> int:
        """Record an accepted request durably; return its number. Raises UnavailableError when that cannot be done."""
        self.check()
        done: Future[int] = Future()
        self._put(lambda: self._accept(done, lambda: self._journal.accept(request_id, job, prompts, owner, key)))
        try:
            return await asyncio.wrap_future(done)
        except asyncio.CancelledError:
            # Recorded all the same, perhaps: then it ends at once.
            done.add_done_callback(self._end_unwanted)
            raise

    async def write_output(self, number: int, index: int, delta: OutputDelta) -> None:
        """Record output, before it is sent. On a full disk it returns all the same: the answer goes on."""
        done: Future[None] = Future()
        if self._put(lambda: self._write(done, number, index, delta)):
            await asyncio.wrap_future(done)

    def end(self, number: int) -> None:
        """Record, soon, that a request has ended. Idempotent."""
        self._put(lambda: self._end(number))

    def close(self) -> None:
        """Write what is queued, and stop; unfinished requests are left to the next server. Idempotent."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join()
        self._disk.shutdown()
        self._copier.shutdown()
        if self._copying is not None and self._copying.exception() is None:
            self._copying.result().close()
        self._journal.close()

    def _end_unwanted(self, done: Future[int]) -> None:
        if not done.cancelled() and done.exception() is None:
            self.end(done.result())

    def _put(self, work: Callable[[], None]) -> bool:
        """Queue work for the thread; return False when the writer is closed."""
        with self._wake:
            if not self._closed:
                self._queue.append(work)
                self._wake.notify()
            return not self._closed

    # -- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._wake:
                if not self._queue and not self._closed:
                    self._wake.wait(_RETRY_S if self._kept or self.problem or self._dirty or self._copying else None)
                batch, last = list(self._queue), self._closed
                self._queue.clear()
            for work in batch:
                work()
            if self.problem is not None:
                self._try_again()
            self._compact()
            self._sync(last)
            if last:
                return

    def _accept(self, done: Future[int], record: Callable[[], int]) -> None:
        if not done.set_running_or_notify_cancel():
            return
        try:
            number = record()
        except OSError as error:
            self._fail(error)
            done.set_exception(UnavailableError(f"the journal cannot be written ({self._where}: {self.problem})", 5.0))
            return
        self._dirty = True
        self._unsynced.append((done, number))

    def _write(self, done: Future[None], number: int, index: int, delta: OutputDelta) -> None:
        if not done.set_running_or_notify_cancel():
            return
        try:
            if number in self._given_up:
                return
            # In order: what could not be written goes first.
            if self._kept:
                self._keep(number, index, delta)
                return
            self._journal.write_output(number, index, delta)
            self._dirty = True
        except OSError as error:
            self._fail(error)
            self._keep(number, index, delta)
        finally:
            done.set_result(None)

    def _end(self, number: int) -> None:
        self._given_up.discard(number)
        if self._kept:
            self._kept = deque(each for each in self._kept if each[0] != number)
        try:
            self._journal.end(number)
            self._dirty = True
        except OSError as error:
            # In place, so a full disk does not stop it; whatever else did may pass.
            self._fail(error)
            self._unended.add(number)

    def _keep(self, number: int, index: int, delta: OutputDelta) -> None:
        if len(self._kept) >= _MOST_KEPT:
            self._given_up.update(each[0] for each in self._kept)
            self._kept.clear()
        if number not in self._given_up:
            self._kept.append((number, index, delta))

    def _fail(self, error: OSError) -> None:
        if self.problem is None:
            self.problem = os.strerror(error.errno) if error.errno else str(error)
            log.error("the journal cannot be written", extra={"fields": {"where": self._where, "why": self.problem}})

    def _compact(self) -> None:
        """Have the file written anew by another thread, where that is due, and take it once it is there."""
        if self._copying is None:
            if self._journal.compaction_due or self._unsure:
                copy = self._journal.copy_live()
                self._copying = self._copier.submit(self._copied, copy)
            return
        if not self._copying.done():
            return
        copying, self._copying = self._copying, None
        try:
            self._journal.adopt(copying.result())
            self._unsure = False
        except OSError as error:
            self._journal.copy_failed(error)
            if self._unsure:
                self._fail(error)

    def _copied(self, copy: JournalCopy) -> JournalCopy:
        try:
            copy.write()
        finally:
            with self._wake:
                self._queue.append(lambda: None)
                self._wake.notify()
        return copy

    def _try_again(self) -> None:
        """Write what was refused; on success all is well again."""
        if self._unsure:
            return
        try:
            # A journal that filled its own disk. A copy that is being made counts on what is there.
            if self._copying is None:
                self._journal.shrink()
            while self._kept:
                self._journal.write_output(*self._kept[0])
                self._kept.popleft()
            for number in sorted(self._unended):
                self._journal.end(number)
                self._unended.remove(number)
            self._journal.check_room(_ROOM_BYTES)
        except OSError:
            return
        self.problem = None
        log.info("the journal can be written again", extra={"fields": {"where": self._where}})

    def _sync(self, last: bool) -> None:
        """Start an fsync where one is due and none is running; `last`: finish all of them."""
        if self._unsure:
            waiting, self._unsynced = self._unsynced, []
            self._refuse(waiting)
            if not last:
                return
        if self._syncing is not None and last:
            with suppress(OSError):
                self._syncing.result()
        if self._syncing is not None and not self._syncing.done():
            return
        due = self._dirty and time.monotonic() - self._synced_s >= _SYNC_S
        if not (self._unsynced or due or last):
            return
        waiting, self._unsynced = self._unsynced, []
        self._dirty, self._synced_s = False, time.monotonic()
        self._syncing = self._disk.submit(self._fsync, waiting)
        if last:
            self._syncing.result()

    def _fsync(self, waiting: Sequence[tuple[Future[int], int]]) -> None:
        """Bring what was written to the disk, for the requests that wait for it."""
        try:
            self._journal.sync()
        except OSError as error:
            if not self._put(partial(self._not_synced, error, waiting)):
                self._not_synced(error, waiting)
            return
        for done, number in waiting:
            done.set_result(number)
        # The next group may be waiting.
        with self._wake:
            self._wake.notify()

    def _not_synced(self, error: OSError, waiting: Sequence[tuple[Future[int], int]]) -> None:
        self._unsure = True
        self._fail(error)
        self._refuse(waiting)

    def _refuse(self, waiting: Sequence[tuple[Future[int], int]]) -> None:
        for done, number in waiting:
            self._end(number)
            done.set_exception(UnavailableError(f"the journal cannot be written ({self._where}: {self.problem})", 5.0))


Kind = Literal["completion", "chat", "response"]


class _JournaledJob(msgspec.Struct, frozen=True):
    """A `GenerationJob` without its prompts, in the journal's encoding."""

    kind: Kind
    model: str
    params: SamplingParams
    text: TextOptions
    slo: Slo
    priority: int
    timeout_s: float | None
    stream: bool
    include_usage: bool
    request_class: str | None = None
    continuous_usage: bool = False
    choices: int = 1
    cache_salt: str = ""
    cache_prompt: bool = True


@dataclass(slots=True)
class JournaledRequest:
    """One HTTP request's entry in the journal."""

    journal: JournalWriter
    number: int
    earlier: Sequence[Sequence[OutputDelta]] | None = None
    """Output from before a restart, by prompt; None for a request that this server accepted."""

    @classmethod
    async def of(
        cls, journal: JournalWriter, request_id: str, key: str, owner: str, kind: Kind, job: GenerationJob
    ) -> JournaledRequest:
        """Record a request that was just accepted. Raises UnavailableError when the disk takes nothing more."""
        saved = _JournaledJob(
            kind, job.model, job.params, job.text, job.slo, job.priority, job.timeout_s, job.stream, job.include_usage,
            job.request_class, job.continuous_usage, job.choices, job.cache_salt, job.cache_prompt,
        )  # fmt: skip
        prompts = [prompt.data for prompt in job.prompts]
        return cls(journal, await journal.accept(request_id, msgspec.msgpack.encode(saved), prompts, owner, key))

    def emitted_before(self, index: int) -> Sequence[OutputDelta]:
        """Return the output of prompt `index` from before a restart."""
        return self.earlier[index] if self.earlier is not None else ()

    @property
    def resumes(self) -> bool:
        """Whether an earlier server accepted the request."""
        return self.earlier is not None

    async def write(self, index: int, delta: OutputDelta) -> None:
        """Record output of prompt `index`; called before it is sent to the client."""
        await self.journal.write_output(self.number, index, delta)

    def end(self) -> None:
        """Record that the request has ended: answered, or abandoned by its client."""
        self.journal.end(self.number)


def job_of(entry: JournalEntry, now_s: float, unix_s: float) -> tuple[Kind, GenerationJob]:
    """Restore the job of a request that an earlier server accepted.

    now_s, unix_s: the present on the monotonic and on the Unix clock. Queue time counts from the first acceptance; a
    time limit starts again from now.
    """
    saved = msgspec.msgpack.decode(entry.accepted.job, type=_JournaledJob)
    # The Unix clock may have been set back between the two processes.
    age_s = max(0.0, unix_s - entry.accepted.at_s)
    job = GenerationJob(
        model=saved.model,
        # int32: four bytes per token id
        prompts=tuple(TokenPrompt(memoryview(data), len(data) // 4) for data in entry.accepted.prompts),
        params=saved.params,
        text=saved.text,
        slo=saved.slo,
        priority=saved.priority,
        # `timeout_s` counts from `received_s`, which lies `age_s` in the past.
        timeout_s=None if saved.timeout_s is None else saved.timeout_s + age_s,
        received_s=now_s - age_s,
        stream=saved.stream,
        include_usage=saved.include_usage,
        request_class=saved.request_class,
        continuous_usage=saved.continuous_usage,
        choices=saved.choices,
        cache_salt=saved.cache_salt,
        cache_prompt=saved.cache_prompt,
    )
    return saved.kind, job
