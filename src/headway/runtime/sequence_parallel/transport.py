"""Interface of tensor transport between ranks. Live: `gloo.GlooTransport`, or instance sockets; in tests: threads.

Point to point only. A group is chosen for each chunk of each request, and it grows: communicators for collectives would
have to be made by all ranks of the world for every group that occurs, and shares are uneven, which gloo's collectives
are not. Each exchange of this package moves no more bytes than the collective that it stands for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Protocol

from torch import Tensor


class MessageStream(IntEnum):
    """Stream of messages between two ranks. Order is kept within a stream, not between streams."""

    ROWS = 0
    RING = 1
    HISTORY = 2
    WEIGHTS = 3
    PAUSE = 4


class TensorTransport(Protocol):
    """One rank's end."""

    @property
    def rank(self) -> int:
        """This rank's number."""

    def exchange(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], stream: MessageStream
    ) -> Callable[[], None]:
        """Begin to send tensors to ranks and to fill tensors from ranks; the returned function waits for all of them.

        All are contiguous and not empty. Until it has waited, the caller changes nothing that is sent and reads nothing
        that is filled. Peers begin their sides in the same order within a stream.
        """
