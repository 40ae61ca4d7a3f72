"""Completion of an operation in another thread, with success or failure."""

from __future__ import annotations

import threading
from collections.abc import Callable

from headway.runtime.kv_transfer.peer import PeerLostError


class Completion:
    """Something that will have happened, or will not, with another end (`PeerLostError.end`). `wait` in one thread, at
    any time."""

    __slots__ = ("_done", "_end", "_gate", "_why")

    def __init__(self, end: int | None = None) -> None:
        self._end = end
        self._gate = threading.Lock()
        self._gate.acquire()
        self._why: str | None = None
        self._done = False

    @property
    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._done

    def wait(self, look: Callable[[], None] | None = None, every_s: float = 0.02) -> None:
        """Return when it has happened; PeerLostError when it will not. `look` is called every so often meanwhile; what
        it raises ends the wait."""
        while not self._done:
            if self._gate.acquire(timeout=-1 if look is None else every_s):
                self._gate.release()
            elif look is not None:
                look()
        if self._why is not None:
            raise PeerLostError(self._why, self._end)

    def finish(self, why: str | None = None) -> None:
        """It has happened (None), or never will. Once; later calls are ignored. Not for those who wait."""
        if not self._done:
            self._why, self._done = why, True
            self._gate.release()
