"""Write-ahead journal of accepted requests and their output, from which a new server process resumes them.

Each request has a file of its own, which is removed when the request ends. So nothing is ever compacted, an end needs
no room on a full disk, and a write that fails concerns one request. A file is a sequence of frames: length of the
payload, CRC-32 of length and payload, payload. The first says what was accepted, each other one holds output. Reading
stops at the first frame that is not whole: what stood behind it is computed again.

Every record is written before what it says leaves the server. An accepted request is on the disk (fsync) before it goes
to the engine; several threads do that, since the file system brings what comes together to the disk at once. Output is
on the disk a second later: what a crash of the machine takes of it is computed again.

SQLite in WAL mode was tried in its place, and is not used: one flipped bit in its log dropped 18 of 20 requests, and a
commit that is on the disk took 8 ms and held up each token behind it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import struct
import threading
import time
import zlib
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from headway.core.errors import ConfigError, UnavailableError
from headway.core.files import PART, PrivateFolder
from headway.runtime.engine.protocol import OutputDelta
from headway.serving.jobs import GenerationJob, TokenPrompt

log = logging.getLogger("headway.server")

Kind = Literal["completion", "chat", "response"]

_FILE, _DAMAGED, _PROBE = "request-", "damaged-", "probe"
"""Beginnings of the names of the journal's files."""
_EARLIER = "requests.journal"
"""The one file of earlier versions."""
_HEAD = struct.Struct("<II")
_LENGTH = struct.Struct("<I")


class RequestAccepted(msgspec.Struct, frozen=True, array_like=True, tag="a"):
    """A client's request was accepted."""

    id: str
    """The client's `X-Request-Id`, or one made by the server: a label, which several requests may have."""
    owner: str
    """Who may read and delete it (`access.RequestOwner.id`)."""
    at_s: float
    """Time of acceptance, Unix seconds: a monotonic clock does not survive a reboot."""
    job: bytes
    """Its kind and its `GenerationJob` without the prompts, encoded."""
    prompts: tuple[bytes, ...]
    """Token ids, int32, little-endian."""
    key: str
    """The server's own id (`errors.own_id`)."""
    model: str
    """Name and size of the model whose token ids these are."""


class OutputRecorded(msgspec.Struct, frozen=True, array_like=True, tag="t"):
    """Output of prompt `index` of the request."""

    index: int
    delta: OutputDelta


Record = RequestAccepted | OutputRecorded

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)


@dataclass(slots=True)
class JournalEntry:
    """A request that has not ended."""

    accepted: RequestAccepted
    outputs: list[list[OutputDelta]] = field(default_factory=list)
    """Recorded output, by prompt, in order."""


class RequestJournal:
    """The journal in a folder, which is created when missing. Its methods may be called by several threads, but those
    of one request one after another.

    Raises ConfigError when another server has the folder locked, and for a folder that cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder
        self._folder = PrivateFolder(folder, (_FILE, _DAMAGED, _PROBE, _EARLIER), "--journal")
        # Requests that an earlier process accepted and did not end, by number.
        self.unfinished: dict[int, JournalEntry] = {}
        self._model = ""
        self._closed = False
        # Ended requests whose files could not be removed.
        self._unended: set[int] = set()
        try:
            if _EARLIER in self._folder.names():
                raise ConfigError(f"--journal {folder} is of an earlier version of Headway: give another folder")
            for name in self._folder.names():
                if name.endswith(PART):
                    self._folder.remove(name)
                elif name.startswith(_FILE):
                    self._load(name)
            self.check_room(4096)
        except OSError as error:
            self._folder.close()
            raise ConfigError(f"--journal {folder}: {error.strerror}; make room or give another folder") from error
        except BaseException:
            self._folder.close()
            raise
        self._numbers = itertools.count(max(self.unfinished, default=0) + 1)

    def belongs_to(self, model: str) -> None:
        """Bind the journal to a model, once it is known. Raises ConfigError when unfinished requests are of another."""
        others = [each.accepted.model for each in self.unfinished.values() if each.accepted.model not in ("", model)]
        if others:
            raise ConfigError(
                f"--journal {self._path} holds {len(others)} unfinished requests of {others[0]}, and this "
                f"server has {model}: serve that model, or give another --journal"
            )
        self._model = model

    def accept(
        self, request_id: str, job: bytes, prompts: Sequence[bytes | memoryview], owner: str = "", key: str = ""
    ) -> int:
        """Bring an accepted request to the disk; return its number. Raises OSError, and leaves nothing of it."""
        number = next(self._numbers)
        record = RequestAccepted(request_id, owner, time.time(), job, tuple(map(bytes, prompts)), key, self._model)
        try:
            self._folder.write(_name(number), _framed(record))
        except OSError:
            with suppress(OSError):
                self.end(number)
            raise
        return number

    def write_output(self, number: int, index: int, delta: OutputDelta) -> None:
        """Record output; called before it is sent to the client.

        Does nothing for a request that has ended. Raises OSError when the record cannot be written; earlier records
        stay intact.
        """
        if not self._closed:
            with suppress(FileNotFoundError):
                self._folder.append(_name(number), _framed(OutputRecorded(index, delta)))

    def end(self, number: int) -> None:
        """Record that a request has ended. Idempotent. Needs no room on the disk. Raises OSError: `retry_ends`."""
        if self._closed:
            return
        self.unfinished.pop(number, None)
        self._unended.add(number)
        self._folder.remove(_name(number))
        self._unended.discard(number)

    def retry_ends(self) -> None:
        """Remove the files of requests whose end could not be recorded. Raises OSError."""
        for number in sorted(self._unended):
            self.end(number)

    def sync(self, number: int) -> None:
        """Return when all output of a request is on the disk. Raises OSError."""
        if not self._closed:
            with suppress(FileNotFoundError):
                self._folder.sync(_name(number))

    def check_room(self, size: int) -> None:
        """Raise OSError unless `size` more bytes can be written."""
        try:
            self._folder.write(_PROBE, bytes(size))
        finally:
            self._folder.remove(_PROBE)

    def close(self) -> None:
        """Stop writing; unfinished requests are left to the next server. Idempotent."""
        self._closed = True
        self._folder.close()

    def _load(self, name: str) -> None:
        """Read the file of an unfinished request. Of a damaged one a copy is kept, and what is whole is used."""
        data = self._folder.read(name)
        records, size = _whole_records(data)
        first = records[0] if records else None
        if size < len(data) or not isinstance(first, RequestAccepted):
            kept = f"{_DAMAGED}{name}-{int(time.time() * 1000)}"
            self._folder.write(kept, data)
            fields = {"file": f"{self._path}/{name}", "bytes": len(data) - size, "kept_as": kept}
            log.warning("the journal is damaged: what follows in this file is dropped", extra={"fields": fields})
            if not isinstance(first, RequestAccepted):
                self._folder.remove(name)
                return
            self._folder.write(name, data[:size])
        entry = JournalEntry(first, [[] for _ in first.prompts])
        for record in records[1:]:
            if isinstance(record, OutputRecorded):
                entry.outputs[record.index].append(record.delta)
        self.unfinished[int(name.removeprefix(_FILE))] = entry


def _name(number: int) -> str:
    return f"{_FILE}{number:012}"


def _framed(record: Record) -> bytes:
    payload = _encoder.encode(record)
    return _HEAD.pack(len(payload), _checksum(payload)) + payload


def _checksum(payload: bytes | memoryview) -> int:
    return zlib.crc32(payload, zlib.crc32(_LENGTH.pack(len(payload))))


def _whole_records(data: bytes) -> tuple[list[Record], int]:
    """Return the records of a file up to the first frame that is not whole, and the bytes that they take."""
    view, at, records = memoryview(data), 0, list[Record]()
    while at + _HEAD.size <= len(data):
        length, checksum = _HEAD.unpack_from(data, at)
        payload = view[at + _HEAD.size : at + _HEAD.size + length]
        if len(payload) < length or _checksum(payload) != checksum:
            break
        try:
            records.append(_decoder.decode(payload))
        except msgspec.DecodeError:
            break
        at += _HEAD.size + length
    return records, at


_SYNC_S = 1.0
_RETRY_S = 0.5
_ROOM_BYTES = 256 << 10
"""Room that must be there before a disk no longer counts as full."""
_SYNCING_THREADS = 8
"""Threads that wait for the disk: as many requests are accepted at one time."""


class JournalWriter:
    """Access to a journal from the event loop."""

    def __init__(self, journal: RequestJournal, where: str) -> None:
        self._journal = journal
        self._where = where
        # Why nothing can be written at present; None: all is well.
        self.problem: str | None = None
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._healing: threading.Thread | None = None
        # Output and ends are written one after another, so that an end comes after the request's output.
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="headway-journal")
        self._disk = ThreadPoolExecutor(_SYNCING_THREADS, thread_name_prefix="headway-journal-sync")
        # Used by the writer's thread only. Requests whose output the disk has refused: no more of it is written. Then
        # requests with output since the last sync.
        self._given_up: set[int] = set()
        self._unsynced: set[int] = set()
        self._synced_s = time.monotonic()

    @property
    def unfinished(self) -> dict[int, JournalEntry]:
        """Requests that an earlier server left in the journal and that have not ended, by number."""
        return dict(self._journal.unfinished)

    def belongs_to(self, model: str) -> None:
        """See `RequestJournal`."""
        self._journal.belongs_to(model)

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
        if self._closed.is_set():
            raise UnavailableError("the server is ending; send the request again later", 5.0)
        done = self._disk.submit(self._accept, request_id, job, prompts, owner, key)
        try:
            return await asyncio.shield(asyncio.wrap_future(done))
        except asyncio.CancelledError:
            # Recorded all the same, perhaps: then it ends at once.
            done.add_done_callback(self._end_unwanted)
            raise

    async def write_output(self, number: int, index: int, delta: OutputDelta) -> None:
        """Record output, before it is sent. On a full disk it returns all the same: the answer goes on."""
        if not self._closed.is_set():
            await asyncio.wrap_future(self._writer.submit(self._write, number, index, delta))

    def end(self, number: int) -> None:
        """Record, soon, that a request has ended. Idempotent."""
        if not self._closed.is_set():
            self._writer.submit(self._end, number)

    def close(self) -> None:
        """Write what is queued, and stop; unfinished requests are left to the next server. Idempotent."""
        self._closed.set()
        self._writer.shutdown()
        self._disk.shutdown()
        if self._healing is not None:
            self._healing.join()
        self._journal.close()

    def _end_unwanted(self, done: Future[int]) -> None:
        if done.exception() is None:
            self.end(done.result())

    # -- the threads --------------------------------------------------------------------------------------------

    def _accept(self, *request: Any) -> int:
        try:
            return self._journal.accept(*request)
        except OSError as error:
            self._fail(error)
            raise UnavailableError(f"the journal cannot be written ({self._where}: {self.problem})", 5.0) from None

    def _write(self, number: int, index: int, delta: OutputDelta) -> None:
        if number in self._given_up:
            return
        try:
            self._journal.write_output(number, index, delta)
        except OSError as error:
            self._given_up.add(number)
            self._fail(error)
            return
        self._unsynced.add(number)
        if time.monotonic() - self._synced_s >= _SYNC_S and not self._closed.is_set():
            self._synced_s = time.monotonic()
            numbers, self._unsynced = self._unsynced, set()
            with suppress(RuntimeError):  # closed meanwhile
                self._disk.submit(self._sync, numbers)

    def _end(self, number: int) -> None:
        self._given_up.discard(number)
        self._unsynced.discard(number)
        try:
            self._journal.end(number)
        except OSError as error:
            self._fail(error)

    def _sync(self, numbers: set[int]) -> None:
        for number in numbers:
            try:
                self._journal.sync(number)
            except OSError as error:
                self._fail(error)

    def _fail(self, error: OSError) -> None:
        """Refuse new requests until the disk can be written again."""
        with self._lock:
            if self.problem is not None:
                return
            self.problem = os.strerror(error.errno) if error.errno else str(error)
            log.error("the journal cannot be written", extra={"fields": {"where": self._where, "why": self.problem}})
            self._healing = threading.Thread(target=self._heal, name="headway-journal-heal", daemon=True)
            self._healing.start()

    def _heal(self) -> None:
        while not self._closed.wait(_RETRY_S):
            try:
                self._journal.retry_ends()
                self._journal.check_room(_ROOM_BYTES)
            except OSError:
                continue
            self.problem = None
            log.info("the journal can be written again", extra={"fields": {"where": self._where}})
            return


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
        saved = msgspec.msgpack.encode((kind, replace(job, prompts=())))
        prompts = [prompt.data for prompt in job.prompts]
        return cls(journal, await journal.accept(request_id, saved, prompts, owner, key))

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
    kind, job = msgspec.msgpack.decode(entry.accepted.job, type=tuple[Kind, GenerationJob])
    # The Unix clock may have been set back between the two processes.
    age_s = max(0.0, unix_s - entry.accepted.at_s)
    return kind, replace(
        job,
        prompts=tuple(TokenPrompt.holding(data) for data in entry.accepted.prompts),
        # `timeout_s` counts from `received_s`, which lies `age_s` in the past.
        timeout_s=None if job.timeout_s is None else job.timeout_s + age_s,
        received_s=now_s - age_s,
    )
