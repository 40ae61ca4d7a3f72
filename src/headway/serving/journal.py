"""A write-ahead journal of accepted requests and their output, from which a new server process goes on.

An append-only file of records, each with its length and CRC-32. A record is written (one `write`) before the output it
holds leaves the server, so it outlives the process, however that ends; a thread calls fsync every second, so at most
the last second
is lost with the whole machine. A last record that is torn is dropped. The file is written anew, without what has ended,
when it is opened and whenever most of it has ended.
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
_HEAD = struct.Struct("<II")
_SYNC_S = 1.0
_SCHEMA = 1


class JournalOpened(msgspec.Struct, frozen=True, array_like=True, tag="o"):
    """The first record."""

    schema: int
    model: str = ""
    """The model of the token ids; empty until it is known."""


class RequestAccepted(msgspec.Struct, frozen=True, array_like=True, tag="a"):
    """A client's request was accepted."""

    number: int
    id: str
    """The client's, or one that the server made."""
    at_s: float
    """Unix time."""
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
    """The client has its answer, or none will be asked for."""

    number: int


Record = JournalOpened | RequestAccepted | OutputRecorded | RequestEnded

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)


@dataclass(slots=True)
class JournalEntry:
    """A request that has not ended, and the output of each of its prompts."""

    accepted: RequestAccepted
    outputs: list[list[OutputDelta]] = field(default_factory=list)


class RequestJournal:
    """The journal in `folder`, made if need be; `unfinished` is what an earlier process has not ended, by number.

    Raises ConfigError when another server writes to it. Not safe between threads, but for its own.
    """

    def __init__(self, folder: Path, slack_bytes: int = 64 << 20) -> None:
        self._slack_bytes = self._allowed_bytes = slack_bytes
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(folder / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"--journal {folder}: {error.strerror}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise ConfigError(f"--journal {folder}: another server writes to it; give each its own folder") from None
        self._path = folder / _FILE
        self._opened = JournalOpened(_SCHEMA)
        self.unfinished: dict[int, JournalEntry] = {}
        self._live: dict[int, int] = {}
        self._size = 0
        self._next = 1
        self._file = -1
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
        """Called once the model is known. Raises ConfigError when unfinished requests are of another."""
        if self._opened.model not in ("", model) and self.unfinished:
            raise ConfigError(
                f"{self._path} holds {len(self.unfinished)} unfinished requests of {self._opened.model}, and this "
                f"server has {model}: serve that model, or give another --journal"
            )
        if self._opened.model != model:
            self._opened = JournalOpened(_SCHEMA, model)
            self._rewrite()

    def accept(self, request_id: str, job: bytes, prompts: Sequence[bytes | memoryview]) -> int:
        """Write down an accepted request; its number in this journal."""
        number, self._next = self._next, self._next + 1
        self._append(number, RequestAccepted(number, request_id, time.time(), job, tuple(map(bytes, prompts))))
        return number

    def write_output(self, number: int, index: int, delta: OutputDelta) -> None:
        """Write down output before it is sent. Raises OSError when it cannot be written; earlier records stay good."""
        if number in self._live:
            self._append(number, OutputRecorded(number, index, delta))

    def end(self, number: int) -> None:
        """Write down that a request has ended. Harmless when repeated."""
        if number not in self._live or self._closed:
            return
        self._append(number, RequestEnded(number))
        del self._live[number]
        self.unfinished.pop(number, None)
        if self._size - sum(self._live.values()) > self._allowed_bytes:
            self._compact()

    def close(self) -> None:
        """Stop writing: what has not ended is left to the next server. Harmless when repeated."""
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
        """Append all of the record, or raise OSError and append nothing: records behind a torn one would be lost."""
        if self._closed:
            return
        frame = _framed(record)
        with self._guard:
            try:
                _write(self._file, frame)
            except OSError:
                os.ftruncate(self._file, self._size)
                raise
            self._dirty = True
        self._size += len(frame)
        self._live[number] = self._live.get(number, 0) + len(frame)

    def _load(self) -> None:
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
                self._next = max(self._next, record.number + 1)
            elif isinstance(record, RequestEnded):
                self.unfinished.pop(record.number, None)
            elif record.number in self.unfinished:
                self.unfinished[record.number].outputs[record.index].append(record.delta)
        if good < len(data):
            log.warning("%s: dropped %d bytes behind its last whole record", self._path, len(data) - good)
        self._live = dict.fromkeys(self.unfinished, 0)
        self._rewrite(data[:good])

    def _compact(self) -> None:
        """Rewrite the file without ended requests. Where the disk has no room for a second file, the old one grows on;
        the next try is when as many bytes more have ended, because each try reads all of it."""
        try:
            self._rewrite()
            self._allowed_bytes = self._slack_bytes
        except OSError as error:
            self._allowed_bytes += self._slack_bytes
            log.warning("%s cannot be written anew without what has ended: %s", self._path, error.strerror)

    def _rewrite(self, data: bytes | None = None) -> None:
        """Write a new file of unfinished requests' records, then replace the old one; on OSError the old one stays in
        use."""
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
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _sync(self) -> None:
        while not self._stop.wait(_SYNC_S):
            with self._guard:
                dirty, self._dirty = self._dirty, False
                copy = os.dup(self._file) if dirty else -1
            if copy >= 0:
                with suppress(OSError):  # a full disk shows where it is written to
                    os.fsync(copy)
                os.close(copy)


def _framed(record: Record) -> bytes:
    payload = _encoder.encode(record)
    return _HEAD.pack(len(payload), zlib.crc32(payload)) + payload


def _records(data: bytes) -> Iterator[tuple[int, Record]]:
    """Whole records from the beginning, each with where it ends. Stops at the first that is not whole."""
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
        view = view[os.write(file, view) :]
