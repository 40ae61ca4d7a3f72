"""What `InstanceAgent` asks of its parts: executor of span tasks, KV transfers, peers, the engine's loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from headway.core.executor import EmittedToken
from headway.core.sampling import SamplingParams
from headway.runtime.engine.instance_protocol import ComputeSpan, FromInstance, PeerAddress, ReserveKv, SendKv

Slots = Sequence[tuple[int, int]]
"""Slots of the KV pool, as (first, count)."""


class _SavedBytes(Protocol):
    @property
    def kv_bytes(self) -> int: ...
    @property
    def activation_bytes(self) -> int: ...
    @property
    def kv_bytes_at_end(self) -> int: ...


class SpanExecution(Protocol):
    """The executor of span tasks: `runtime.sequence_parallel.span_executor.SpanExecutor`, or, for several ranks,
    `runtime.sequence_parallel.multi_rank_span_executor.MultiRankSpanExecutor`."""

    def admit(self, name: str, prompt: memoryview, params: SamplingParams, output: tuple[int, ...]) -> None: ...

    def begin(
        self, compute: ComputeSpan, allocate_slots: Callable[[int, bool], Slots], look: Callable[[], None]
    ) -> None: ...

    def go(self, name: str, pause: Callable[[], bool] | None, behind: Callable[[int], None]) -> bool: ...

    def finish(self, name: str) -> tuple[EmittedToken | None, bool]: ...

    def saved(self, name: str) -> tuple[int, int, _SavedBytes]: ...

    def whole(self, name: str, tokens: int) -> bool: ...

    def check(self, name: str) -> None: ...

    def forget(self, name: str) -> None: ...

    def __contains__(self, name: str) -> bool: ...


class KvTransferManager(Protocol):
    """KV transfers between instances (`runtime.kv_transfer.connector`).

    All methods are called in the loop's thread.
    """

    def take(self, message: ReserveKv | SendKv) -> None:
        """Handle a reservation or a transfer that the controller asks for."""

    def granted(self, name: str) -> None:
        """Open the blocks that `StagedKv` has given to a reservation."""

    def settle(self, request: str) -> None:
        """Finish reading a request's KV before its slots are overwritten or freed."""

    def layers_are_there(self, request: str) -> None:
        """Send what a task has made available: a layer of it is computed, or all of it."""

    def turn(self) -> list[FromInstance]:
        """Return the messages for the controller. Called once in every turn of the loop."""

    def forget(self, name: str) -> None:
        """End all transfers of a request. Called before its KV is freed."""


class PeerTable(Protocol):
    """The other instances: `runtime.kv_transfer.peers.PeerNetwork`, or `MultiRankPeers` for several ranks. `number`:
    this instance's."""

    @property
    def number(self) -> int: ...

    def meet(self, peers: Iterable[PeerAddress]) -> None: ...

    def forget(self, scope: str) -> None: ...


class EngineLoop(Protocol):
    """The engine's loop, as it may be called from inside a span task."""

    def send(self, message: FromInstance, measured: bool = False) -> None:
        """Send a message; measured: after a stats snapshot of the pool as it is now."""

    def turn(self, step: bool, wait_s: float = 0.0) -> None:
        """Handle messages, waiting up to `wait_s` for one, and send what is pending; step: also run one iteration of
        the scheduler."""
