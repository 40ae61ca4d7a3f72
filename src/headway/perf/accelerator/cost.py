"""Cost of an operator independent of HBM bandwidth, and its time at a given bandwidth."""

from __future__ import annotations

from typing import NamedTuple


class OpCost(NamedTuple):
    """Cost of one operator.

    No field depends on bandwidth: a mapping is chosen for the fewest bytes, then the fewest cycles. So time is a
    convex, piecewise linear function of 1 / bandwidth, and the results of `sizing` are exact.
    """

    name: str
    unit: str
    """"array" or "vector"."""
    compute_s: float
    """Seconds of its unit."""
    hbm_bytes: float
    """All bytes over HBM."""
    fill_bytes: float = 0.0
    """Bytes of `hbm_bytes` during which the unit waits: the first tiles, or all without double-buffering."""
    peak_bytes: float = 0.0
    """On-chip memory that it holds."""
    mapping: str = ""
    """Mapping in words."""

    def seconds(self, bandwidth: float) -> float:
        """Return its time at `bandwidth` bytes/s: the fill, then compute and the other transfers concurrently."""
        fill = self.fill_bytes
        return fill / bandwidth + max(self.compute_s, (self.hbm_bytes - fill) / bandwidth)

    def idle_bytes(self, bandwidth: float) -> float:
        """Return the bytes that HBM could move besides while this operator runs."""
        return max(0.0, self.seconds(bandwidth) * bandwidth - self.hbm_bytes)

    def bound(self, bandwidth: float) -> str:
        """Return which of the two bounds it at `bandwidth`: "compute" or "memory"."""
        return "compute" if self.compute_s * bandwidth >= self.hbm_bytes - self.fill_bytes else "memory"


def none(name: str, unit: str = "array") -> OpCost:
    """Return the zero cost of an absent operator."""
    return OpCost(name, unit, 0.0, 0.0)
