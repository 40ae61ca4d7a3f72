"""The journal's thread: records are written off the event loop, and the disk may be full for a while.

Every record is written before what it says leaves the server. An accepted request is on the disk (fsync) before it goes
to the engine; several that come together share one fsync. Output is on the disk a second later: what a crash of the
machine takes of it is computed again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial

from headway.core.errors import UnavailableError
from headway.runtime.engine.protocol import OutputDelta
from headway.serving.journal import JournalCopy, RequestJournal

log = logging.getLogger("headway.server")

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
            # A journal that filled its own disk.
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
