"""Restart of ranks on a separate thread, while the engine keeps serving its clients' messages. No torch."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from headway.core.errors import LostError
from headway.runtime.executor.rank_transport import RankTransport

_PATIENCE_S = 5.0


class RankRestart:
    """Runs `make` on a thread from construction on: it starts ranks and waits until they are ready."""

    def __init__(self, make: Callable[[], RankTransport]) -> None:
        self.ready = os.eventfd(0, os.EFD_CLOEXEC)
        """File descriptor that becomes readable when `make` has returned or failed."""
        self._make = make
        self._made: RankTransport | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="restart", daemon=True)
        self._thread.start()

    def wire(self, timeout_s: float | None) -> RankTransport | None:
        """Return the transport to the new ranks; None while they start. Raises LostError when they could not start.

        Must not be called again after it has returned a transport or raised: it then has closed `ready`.
        """
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return None
        os.close(self.ready)
        if self._error is not None:
            raise LostError(f"the workers could not start again: {self._error}") from self._error
        return self._made

    def abandon(self) -> None:
        """Kill the new ranks, if they are ready within `_PATIENCE_S`. Otherwise they end with this process."""
        self._thread.join(_PATIENCE_S)
        if self._made is not None:
            self._made.kill()

    def _run(self) -> None:
        try:
            self._made = self._make()
        except Exception as error:  # raised again by `wire`
            self._error = error
        # Last: whatever `wire` reads is set before the descriptor becomes readable.
        os.eventfd_write(self.ready, 1)
