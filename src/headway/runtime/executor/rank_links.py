"""What a rank may ask of the others while it computes. Live: `gloo.GlooLinks`; in tests: threads of one process.

Sums and gathers are collective; everything else is point to point and asynchronous: whoever sends goes on at once, and
whoever receives has asked before it needs the answer. Messages between two ranks arrive in the order of sending.
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
        """Ask that group's rank for its next message; the result waits for it. Every message is asked for once, in the
        order of sending."""

    def send_to(self, group: int, x: Tensor) -> None:
        """Send to that group's rank. `x` is contiguous and must not change afterwards."""


class RankLinks(TensorGroup, PeerLinks, Protocol):
    """One rank's connections."""

    def expect_rows(self, rows: int) -> Callable[[], Tensor]:
        """Ask the stage before for its next (rows, hidden); the result waits for them."""

    def send_rows(self, hidden: Tensor) -> None:
        """Pass (rows, hidden) to the stage behind. `hidden` must not change afterwards."""

    def expect_tokens(self, count: int) -> Callable[[], list[int]]:
        """Ask the rank that samples for the next `count` tokens; the result waits for them."""

    def send_tokens(self, tokens: list[int]) -> None:
        """Tell everybody who reads tokens what was drawn."""

    def close(self) -> None:
        """Nothing more will be sent or asked."""
