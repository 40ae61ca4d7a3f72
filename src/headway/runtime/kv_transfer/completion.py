"""Completion of an operation in another thread, with success or failure."""

from __future__ import annotations

import threading
from collections.abc import Callable

from headway.runtime.kv_transfer.peer import PeerLostError


class TransferCompletion:
    """The outcome of an operation with another end (`PeerLostError.end`). `wait` from one thread only, at any time."""

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
        """Return when the operation is complete; raise PeerLostError when it has failed.

        `look` is called every `every_s` seconds meanwhile; what it raises ends the wait.
        """
        while not self._done:
            if self._gate.acquire(timeout=-1 if look is None else every_s):
                self._gate.release()
            elif look is not None:
                look()
        if self._why is not None:
            raise PeerLostError(self._why, self._end)

    def finish(self, why: str | None = None) -> None:
        """Complete the operation (None), or fail it with a reason. Later calls are ignored."""
        # The reason before the release of the lock, on which `wait` blocks.
        if not self._done:
            self._why, self._done = why, True
            self._gate.release()
