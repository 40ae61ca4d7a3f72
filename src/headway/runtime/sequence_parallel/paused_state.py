"""Memory held by a prefill that is paused between layers (PecSched §5.1)."""

from __future__ import annotations

import msgspec


class PausedState(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of a paused chunk on one rank, or on several added up."""

    kv_bytes: int
    """Keys and values of earlier chunks, and of this chunk's finished layers."""
    activation_bytes: int
    """The rows between two layers: all state beside KV."""
    kv_bytes_at_end: int
    """Keys and values once the chunk is finished."""

    @property
    def share(self) -> float:
        """Activations as a share of the KV of all layers: "usually less than 5%" in the paper."""
        return self.activation_bytes / self.kv_bytes_at_end

    def __add__(self, other: PausedState) -> PausedState:
        return PausedState(
            kv_bytes=self.kv_bytes + other.kv_bytes,
            activation_bytes=self.activation_bytes + other.activation_bytes,
            kv_bytes_at_end=self.kv_bytes_at_end + other.kv_bytes_at_end,
        )
