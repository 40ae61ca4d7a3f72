"""Write-ahead journal of accepted requests and their output, from which a new server process resumes them.

The file is append-only: a sequence of records, each with its length and CRC-32. A record is written (one `write`)
before the output it holds leaves the server, so it survives a crash of the process. A thread calls fsync every second,
so a crash of the host loses at most the last second. A torn last record is dropped. The file is rewritten without ended
requests when it is opened, and when ended requests take more than `slack_bytes` of it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import struct
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from headway.core.errors import ConfigError
from headway.runtime.engine.protocol import OutputDelta

log = logging.getLogger("headway.server")

_FILE, _LOCK = "requests.journal", "lock"
# Frame header: payload length in bytes, CRC-32 of the payload; both uint32, little-endian.
_HEAD = struct.Struct("<II")
_SYNC_S = 1.0
_SCHEMA = 1


class JournalOpened(msgspec.Struct, frozen=True, array_like=True, tag="o"):
    """First record of a file: its format and the model that its token ids belong to."""

    schema: int
    model: str = ""
    """Name and size of the model; empty until the engine has started."""


class RequestAccepted(msgspec.Struct, frozen=True, array_like=True, tag="a"):
    """A client's request was accepted."""

    number: int
    id: str
    """Request id: the client's `X-Request-Id`, or one made by the server."""
    at_s: float
    """Time of acceptance, Unix seconds: a monotonic clock does not survive a reboot."""
    job: bytes
    """A `journaled_request._JournaledJob`, encoded."""
    prompts: tuple[bytes, ...]
    """Token ids, int32, little-endian."""


class OutputRecorded(msgspec.Struct, frozen=True, array_like=True, tag="t"):
    """Output of prompt `index` of a request."""

    number: int
    index: int
    delta: OutputDelta


class RequestEnded(msgspec.Struct, frozen=True, array_like=True, tag="e"):
    """The answer was delivered or is no longer wanted: the request needs no recovery."""

    number: int


Record = JournalOpened | RequestAccepted | OutputRecorded | RequestEnded

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)


@dataclass(slots=True)
class JournalEntry:
    """A request that has not ended."""

    accepted: RequestAccepted
    outputs: list[list[OutputDelta]] = field(default_factory=list)
    """Recorded output, by prompt, in order."""


class RequestJournal:
    """The journal in a folder, which is created when missing.

    Raises ConfigError when another server has the folder locked. All methods are called on the event loop; the only
    other thread is the journal's own, which calls fsync.
    """

    def __init__(self, folder: Path, slack_bytes: int = 64 << 20) -> None:
        # Bytes of ended requests that trigger a rewrite; `_allowed_bytes` grows after a rewrite that failed.
        self._slack_bytes = self._allowed_bytes = slack_bytes
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(folder / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"--journal {folder}: {error.strerror}") from error
        try:
            # The lock is on a file of its own, because a rewrite replaces the journal's inode.
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise ConfigError(f"--journal {folder}: another server writes to it; give each its own folder") from None
        self._path = folder / _FILE
        self._opened = JournalOpened(_SCHEMA)
        # Requests that an earlier process accepted and did not end, by number.
        self.unfinished: dict[int, JournalEntry] = {}
        # Bytes in the file of each request that has not ended, by number.
        self._live: dict[int, int] = {}
        self._size = 0
        self._next = 1
        self._file = -1
        # Held around a change of `_file` or `_dirty`, which the fsync thread reads.
        self._guard = threading.Lock()
        try:
            self._load()
        except BaseException:
            os.close(self._lock)
            raise
        self._dirty = self._closed = False
        self._stop = threading.Event()
        self._syncing = threading.Thread(target=self._sync, name="journal-sync", daemon=True)
        self._syncing.start()

    def belongs_to(self, model: str) -> None:
        """Bind the journal to a model, once it is known. Raises ConfigError when unfinished requests are of another."""
        if self._opened.model not in ("", model) and self.unfinished:
            raise ConfigError(
                f"{self._path} holds {len(self.unfinished)} unfinished requests of {self._opened.model}, and this "
                f"server has {model}: serve that model, or give another --journal"
            )
        if self._opened.model != model:
            self._opened = JournalOpened(_SCHEMA, model)
            self._rewrite()

    def accept(self, request_id: str, job: bytes, prompts: Sequence[bytes | memoryview]) -> int:
        """Record an accepted request; return its number in this journal."""
        number, self._next = self._next, self._next + 1
        self._append(number, RequestAccepted(number, request_id, time.time(), job, tuple(map(bytes, prompts))))
        return number

    def write_output(self, number: int, index: int, delta: OutputDelta) -> None:
        """Record output; called before it is sent to the client.

        Does nothing for a request that has ended. Raises OSError when the record cannot be written; earlier records
        stay intact.
        """
        if number in self._live:
            self._append(number, OutputRecorded(number, index, delta))

    def end(self, number: int) -> None:
        """Record that a request has ended. Idempotent."""
        if number not in self._live or self._closed:
            return
        self._append(number, RequestEnded(number))
        del self._live[number]
        self.unfinished.pop(number, None)
        # File size less the bytes of live requests: what a rewrite would free.
        if self._size - sum(self._live.values()) > self._allowed_bytes:
            self._compact()

    def close(self) -> None:
        """Stop writing; unfinished requests are left to the next server. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._stop.set()
        self._syncing.join()
        os.fsync(self._file)
        os.close(self._file)
        os.close(self._lock)

    # -- the file -----------------------------------------------------------------------------------------------

    def _append(self, number: int, record: Record) -> None:
        """Append the whole record, or raise OSError and append nothing: reading stops at a torn record."""
        if self._closed:
            return
        frame = _framed(record)
        with self._guard:
            try:
                _write(self._file, frame)
            except OSError:
                # `_size` is still the end of the last whole record: it grows only after a successful write.
                os.ftruncate(self._file, self._size)
                raise
            self._dirty = True
        self._size += len(frame)
        self._live[number] = self._live.get(number, 0) + len(frame)

    def _load(self) -> None:
        """Read the file of an earlier process, then rewrite it with the unfinished requests only."""
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            data = b""
        good = 0
        for end, record in _records(data):
            good = end
            if isinstance(record, JournalOpened):
                self._opened = record
                if record.schema != _SCHEMA:
                    raise ConfigError(f"{self._path} is of schema {record.schema}; this version reads {_SCHEMA}")
            elif isinstance(record, RequestAccepted):
                self.unfinished[record.number] = JournalEntry(record, [[] for _ in record.prompts])
                # Numbers go on after the largest in the file, those of ended requests included.
                self._next = max(self._next, record.number + 1)
            elif isinstance(record, RequestEnded):
                self.unfinished.pop(record.number, None)
            elif record.number in self.unfinished:
                self.unfinished[record.number].outputs[record.index].append(record.delta)
        if good < len(data):
            log.warning("%s: dropped %d bytes behind its last whole record", self._path, len(data) - good)
        # Sizes are counted by the rewrite.
        self._live = dict.fromkeys(self.unfinished, 0)
        self._rewrite(data[:good])

    def _compact(self) -> None:
        """Rewrite the file without ended requests.

        On a full disk the old file stays in use, and the next attempt waits for `_slack_bytes` more of ended requests,
        because each attempt reads the whole file.
        """
        try:
            self._rewrite()
            self._allowed_bytes = self._slack_bytes
        except OSError as error:
            self._allowed_bytes += self._slack_bytes
            log.warning("%s cannot be written anew without what has ended: %s", self._path, error.strerror)

    def _rewrite(self, data: bytes | None = None) -> None:
        """Write the records of unfinished requests to a new file, then replace the old one.

        data: contents of the old file, where they have been read already. On OSError the old file stays in use.
        """
        data = self._path.read_bytes() if data is None else data
        fresh = self._path.with_suffix(".new")
        live = dict.fromkeys(self._live, 0)
        file = os.open(fresh, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            frame = _framed(self._opened)
            _write(file, frame)
            size = len(frame)
            for _, record in _records(data):
                if not isinstance(record, JournalOpened) and record.number in live:
                    frame = _framed(record)
                    _write(file, frame)
                    size += len(frame)
                    live[record.number] += len(frame)
            os.fsync(file)
            # fsync before the rename: otherwise a crash could leave the final name with empty contents.
            os.replace(fresh, self._path)
        except BaseException:
            os.close(file)
            fresh.unlink(missing_ok=True)
            raise
        with self._guard:
            old, self._file = self._file, file
            self._size, self._live = size, live
        if old >= 0:
            os.close(old)
        # The rename itself is durable only once the folder is synced.
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _sync(self) -> None:
        """Call fsync once a second while there is something new; the body of the journal's own thread."""
        while not self._stop.wait(_SYNC_S):
            with self._guard:
                dirty, self._dirty = self._dirty, False
                # A duplicate, so that fsync runs without the lock while a rewrite may close the original.
                copy = os.dup(self._file) if dirty else -1
            if copy >= 0:
                with suppress(OSError):  # a full disk shows where it is written to
                    os.fsync(copy)
                os.close(copy)


def _framed(record: Record) -> bytes:
    payload = _encoder.encode(record)
    return _HEAD.pack(len(payload), zlib.crc32(payload)) + payload


def _records(data: bytes) -> Iterator[tuple[int, Record]]:
    """Yield whole records from the beginning, each with its end in bytes. Stops at the first torn or corrupt one."""
    at = 0
    while at + _HEAD.size <= len(data):
        size, crc = _HEAD.unpack_from(data, at)
        payload = data[at + _HEAD.size : at + _HEAD.size + size]
        if len(payload) < size or zlib.crc32(payload) != crc:
            return
        try:
            record = _decoder.decode(payload)
        except msgspec.DecodeError:
            return
        at += _HEAD.size + size
        yield at, record


def _write(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        # os.write may write less than it was given, on a nearly full disk for example.
        view = view[os.write(file, view) :]
