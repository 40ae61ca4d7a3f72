"""Interface of communication between ranks while they compute. Live: `gloo_links.GlooLinks`; in tests: threads.

Sums and gathers are collective; everything else is point to point and asynchronous: sends do not block, and receives
are posted before their data is needed. Messages between two ranks arrive in the order of sending.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from headway.runtime.model.decoder import TensorGroup


class PeerLinks(Protocol):
    """One rank's connections with the ranks of the same place in other KV groups."""

    def expect_from(self, group: int, shape: tuple[int, ...], dtype: torch.dtype) -> Callable[[], Tensor]:
        """Post the receive of that group's next message; the returned function waits for it.

        Every message is received once, in the order of sending.
        """

    def send_to(self, group: int, x: Tensor) -> None:
        """Send to that group's rank. `x` is contiguous and must not change afterwards."""


class RankLinks(TensorGroup, PeerLinks, Protocol):
    """One rank's connections."""

    def expect_rows(self, rows: int) -> Callable[[], Tensor]:
        """Post the receive of the previous stage's next (rows, hidden); the returned function waits for it."""

    def send_rows(self, hidden: Tensor) -> None:
        """Send (rows, hidden) to the next stage. `hidden` must not change afterwards."""

    def expect_tokens(self, count: int) -> Callable[[], list[int]]:
        """Post the receive of the next `count` sampled tokens; the returned function waits for them."""

    def send_tokens(self, tokens: list[int]) -> None:
        """Send sampled tokens to all ranks that embed. Called by the rank that samples."""

    def close(self) -> None:
        """Release the connections. No other method is called afterwards."""
