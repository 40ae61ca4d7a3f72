"""When an iteration counts as hung: by its own predicted time, which heartbeats carry. No torch."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Self

_FRAME = struct.Struct("<dd")


@dataclass(frozen=True)
class IterationProgress:
    """How far the iteration is that an engine computes in its own process; without one, both are 0."""

    ran_s: float = 0.0
    """Seconds since it began."""
    predicted_s: float = 0.0

    def encode(self) -> bytes:
        """Return a heartbeat's frame."""
        return _FRAME.pack(self.ran_s, self.predicted_s)

    @classmethod
    def decode(cls, frame: bytes) -> Self:
        """Return the inverse of `encode`; a frame of another form says nothing."""
        return cls(*_FRAME.unpack(frame)) if len(frame) == _FRAME.size else cls()


@dataclass(frozen=True)
class IterationDeadline:
    """An iteration may take `factor` times its predicted time, and `floor_s` in any case.

    The floor covers what predictions do not know: first touches of memory, and other work on the cores.
    """

    floor_s: float
    factor: float

    def allowed_s(self, progress: IterationProgress) -> float:
        """Return the seconds that the iteration may take."""
        return max(self.floor_s, self.factor * progress.predicted_s)

    def missed(self, progress: IterationProgress) -> bool:
        """Whether the iteration hangs."""
        return progress.ran_s > self.allowed_s(progress)
