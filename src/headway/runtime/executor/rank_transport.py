"""How messages travel between the engine and its ranks. Live: ZeroMQ to processes
(`runtime.executor.rank_processes`); in tests:
queues to threads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from headway.core.errors import LostError

Frame = bytes | memoryview


class RankLostError(LostError):
    """A rank's process has ended or is not heard of any more, or it has said that it cannot go on."""

    def __init__(self, rank: int, why: str) -> None:
        super().__init__(f"worker {rank} {why}")
        self.rank = rank


class RankTransport(Protocol):
    """The engine's end. Messages to one rank arrive in order, and so do those from one rank."""

    @property
    def waits_on(self) -> tuple[Any, ...]:
        """Sockets and file descriptors for a `zmq.Poller`: readable when `receive` has something, or a rank is gone."""

    def send(self, rank: int, frames: Sequence[Frame]) -> None:
        """Never blocks."""

    def receive(self, timeout_s: float | None) -> tuple[int, list[bytes]] | None:
        """(rank, frames) of the next message; None when none comes in time. Raises RankLostError."""

    def close(self) -> None:
        """Tell all ranks to stop, end those that do not, and wait until they are gone."""

    def kill(self) -> None:
        """End all ranks at once, whatever they are doing or waiting for, and wait until they are gone."""


class HostLauncher(Protocol):
    """The hosts that ranks run on, where there are several."""

    def ahead_s(self, rank: int) -> float:
        """Seconds to add to the clock of that rank's host to have the engine's."""

    def close(self) -> None:
        """The instance ends, in order, on all of them. After the wire's own `close`."""


class RankChannel(Protocol):
    """A rank's end."""

    def receive(self, wait: bool) -> list[memoryview] | None:
        """The next message's frames; None when there is none and `wait` is false."""

    def send(self, frame: bytes) -> None:
        """To the engine. Never blocks."""
