"""New ranks in the making, on a thread of its own: the engine goes on listening to its clients meanwhile. No torch."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from headway.core.errors import LostError
from headway.runtime.executor.rank_transport import RankTransport

_PATIENCE_S = 5.0


class RankRestart:
    """Begun at construction by calling `make`, which starts ranks and waits until they are ready. `ready` is a file
    descriptor that becomes readable when it is over."""

    def __init__(self, make: Callable[[], RankTransport]) -> None:
        self.ready = os.eventfd(0, os.EFD_CLOEXEC)
        self._make = make
        self._made: RankTransport | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="restart", daemon=True)
        self._thread.start()

    def wire(self, timeout_s: float | None) -> RankTransport | None:
        """The wire to the new ranks; None while there is none. Raises LostError when they could not start. To be called
        until it gives one of these two."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return None
        os.close(self.ready)
        if self._error is not None:
            raise LostError(f"the workers could not start again: {self._error}") from self._error
        return self._made

    def abandon(self) -> None:
        """Nobody wants the ranks any more. Those that start for too long end with this process."""
        self._thread.join(_PATIENCE_S)
        if self._made is not None:
            self._made.kill()

    def _run(self) -> None:
        try:
            self._made = self._make()
        except Exception as error:  # raised again by `wire`
            self._error = error
        os.eventfd_write(self.ready, 1)
