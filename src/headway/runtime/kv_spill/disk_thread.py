"""One thread that reads and writes files while the engine computes: reads first, each in order of submission."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from itertools import count

Completion = Callable[[], None]
"""What the engine's thread is to do when a job is done."""


class DiskThread:
    """Jobs run in the thread; what each returns runs in the thread that calls `take`.

    Jobs handle their own errors. A daemon: it ends with the process, and files are written whole or not at all."""

    def __init__(self) -> None:
        self.unfinished = 0
        """Jobs whose completion has not run."""
        self._jobs: queue.PriorityQueue[tuple[int, int, Callable[[], Completion] | None]] = queue.PriorityQueue()
        self._done: queue.SimpleQueue[Completion] = queue.SimpleQueue()
        # Completions that `wait` has received.
        self._ready: deque[Completion] = deque()
        self._order = count()
        self._thread = threading.Thread(target=self._run, name="kv-spill", daemon=True)
        self._thread.start()

    def read(self, job: Callable[[], Completion]) -> None:
        """Run a job that a request waits for."""
        self._put(0, job)

    def write(self, job: Callable[[], Completion]) -> None:
        """Run a job after all reads."""
        self._put(1, job)

    def wait(self, timeout_s: float) -> None:
        """Return when a job is done, at the latest after `timeout_s`."""
        if self.unfinished and not self._ready:
            try:
                self._ready.append(self._done.get(timeout=timeout_s))
            except queue.Empty:
                return

    @property
    def done(self) -> bool:
        """Whether `take` has something to do."""
        return bool(self._ready) or not self._done.empty()

    def take(self) -> None:
        """Run the completions of all jobs that are done."""
        while not self._done.empty():
            self._ready.append(self._done.get())
        while self._ready:
            self.unfinished -= 1
            self._ready.popleft()()

    def close(self) -> None:
        """Finish all jobs, without their completions. Called once."""
        self._jobs.put((2, next(self._order), None))
        self._thread.join()

    def _put(self, urgency: int, job: Callable[[], Completion]) -> None:
        self.unfinished += 1
        self._jobs.put((urgency, next(self._order), job))

    def _run(self) -> None:
        while (job := self._jobs.get()[2]) is not None:
            self._done.put(job())
