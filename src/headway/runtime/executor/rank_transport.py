"""Interface of message transport between the engine and its ranks.

Live: ZeroMQ to processes (`runtime.executor.rank_processes`); in tests: queues to threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from headway.core.errors import LostError

Frame = bytes | memoryview


class RankLostError(LostError):
    """A rank's process has ended, is silent, or has reported that it cannot go on."""

    def __init__(self, rank: int, why: str) -> None:
        super().__init__(f"worker {rank} {why}")
        self.rank = rank


class RankTransport(Protocol):
    """The engine's end. Messages to one rank arrive in order, and so do those from one rank."""

    @property
    def waits_on(self) -> tuple[Any, ...]:
        """Sockets and file descriptors for a `zmq.Poller`: readable when `receive` has something, or a rank is gone."""

    def send(self, rank: int, frames: Sequence[Frame]) -> None:
        """Send one message. Never blocks. Raises RankLostError."""

    def receive(self, timeout_s: float | None) -> tuple[int, list[bytes]] | None:
        """Return (rank, frames) of the next message; None when none comes in time. Raises RankLostError."""

    def close(self) -> None:
        """Send all ranks `EndProcess`, kill those that do not end, and wait until they are gone."""

    def kill(self) -> None:
        """Kill all ranks at once, and wait until they are gone."""


class HostLauncher(Protocol):
    """The hosts on which ranks run, where there are several."""

    def ahead_s(self, rank: int) -> float:
        """Return the seconds to add to times of that rank's host to convert them to the engine's clock."""

    def close(self) -> None:
        """End the instance on all hosts, in order. Called after the transport's own `close`."""


class RankChannel(Protocol):
    """A rank's end."""

    def receive(self, wait: bool) -> list[memoryview] | None:
        """Return the next message's frames; None when there is none and `wait` is false."""

    def send(self, frame: bytes) -> None:
        """Send one frame to the engine. Never blocks."""
