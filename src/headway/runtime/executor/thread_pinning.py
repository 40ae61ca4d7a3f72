"""Pinning of compute threads to cores during the first iteration after a pause.

Observed under KVM with two cores: when all threads have slept for some 100 ms, the kernel wakes all of them on the one
core that is awake and leaves them there for as long as a short prefill takes, which nearly doubles its time (320
tokens: 77 ms, pinned 56 ms). So for the first iteration after a pause each thread is pinned to its share of the cores.
Only for that iteration: where another process is busy, pinned threads take a third longer.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from contextlib import suppress
from itertools import repeat

from headway.core.cpu_affinity import CORES, shares

PAUSE_S = 0.08
_CHOSEN = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""Environment variables by which a user places threads: with any of them set, nothing is pinned."""


class ThreadPinning:
    """Pins the calling thread, and the threads that libraries have started for it, to cores.

    Made before anything is computed: threads that exist by then, and those of Python's, are left alone. Does nothing
    where `threads` is one, or more than the cores, or the system cannot pin threads (Linux can).
    """

    def __init__(self, threads: int) -> None:
        usable = hasattr(os, "sched_setaffinity") and os.path.isdir("/proc/self/task")
        self._shares = shares(threads) if usable and 2 <= threads <= len(CORES) else []
        if any(name in os.environ for name in _CHOSEN):
            self._shares = []
        self._strangers = _threads() if self._shares else frozenset[int]()
        self._ended_s: float | None = None
        self._bound = False

    def begin(self, now: float) -> None:
        """Pin the threads if this iteration, which begins at `now`, follows a pause.

        Does nothing where the affinity of the calling thread was changed from outside (`taskset -p`).
        """
        # Not before the first iteration: threads started in it would inherit the calling thread's single-core affinity.
        paused = self._ended_s is not None and now - self._ended_s >= PAUSE_S
        if self._shares and paused and os.sched_getaffinity(0) == set(CORES):
            self._bound = True
            self._place(self._shares)

    def end(self, now: float) -> None:
        """Unpin the threads. Called after each iteration, also after one that failed."""
        self._ended_s = now
        if self._bound:
            self._bound = False
            self._place(repeat(CORES))

    def _place(self, places: Iterable[tuple[int, ...]]) -> None:
        """Set the affinity of each compute thread, the calling one first. Threads that have ended are ignored."""
        # Python's own threads (heartbeats, watchers) do not compute and are not moved.
        known = {thread.native_id for thread in threading.enumerate()} | self._strangers
        for thread, place in zip((threading.get_native_id(), *sorted(_threads() - known)), places, strict=False):
            with suppress(OSError):
                os.sched_setaffinity(thread, place)


def _threads() -> frozenset[int]:
    return frozenset(int(name) for name in os.listdir("/proc/self/task"))
