"""What an operator costs on a machine, independent of its HBM bandwidth, and how long that takes at one."""

from __future__ import annotations

from typing import NamedTuple


class OpCost(NamedTuple):
    """compute_s: seconds of its unit. hbm_bytes: everything that it moves. fill_bytes: the part of them during which
    its unit waits (the first tiles; all of them without double-buffering). peak_bytes: on-chip memory that it holds.
    mapping: in words.

    No field depends on bandwidth: a mapping is chosen for the fewest bytes, then the fewest cycles. So time is a
    convex, piecewise linear function of 1 / bandwidth, and every answer in `answers` is exact.
    """

    name: str
    unit: str
    compute_s: float
    hbm_bytes: float
    fill_bytes: float = 0.0
    peak_bytes: float = 0.0
    mapping: str = ""

    def seconds(self, bandwidth: float) -> float:
        """fill, then compute and the rest of the transfers side by side."""
        fill = self.fill_bytes
        return fill / bandwidth + max(self.compute_s, (self.hbm_bytes - fill) / bandwidth)

    def idle_bytes(self, bandwidth: float) -> float:
        """What HBM could move besides while this operator runs."""
        return max(0.0, self.seconds(bandwidth) * bandwidth - self.hbm_bytes)

    def bound(self, bandwidth: float) -> str:
        """What its time is made of: compute or memory."""
        return "compute" if self.compute_s * bandwidth >= self.hbm_bytes - self.fill_bytes else "memory"


def none(name: str, unit: str = "array") -> OpCost:
    """An operator that is not there."""
    return OpCost(name, unit, 0.0, 0.0)
