"""Regression pins: stage figures against the paper, and the model's own microseconds against recorded ones.

`headway accel validate` prints these rows and fails when one leaves its tolerance.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from headway_research.accelerator.stage_figures import FIGURES, setting, stage
from headway_research.base import Mode

FIGURE_TOLERANCE, TABLE_TOLERANCE, CURVE_TOLERANCE = 0.01, 0.005, 0.01

TABLE_US: dict[tuple[int, int], tuple[float, float, float, float]] = {
    (2048, 128): (805.75, 521.73, 1176.11, 870.50),
    (2048, 64): (805.75, 358.05, 1012.43, 860.90),
    (1024, 128): (383.69, 521.73, 754.06, 526.85),
    (1024, 64): (383.69, 358.05, 590.38, 438.84),
    (512, 16): (199.17, 235.29, 270.97, 237.85),
}
"""(prefill tokens, KV Ki tokens): a layer's microseconds for prefill and decode alone, packed, packed with prefetch."""

CURVE: dict[int, tuple[float, float]] = {
    0: (1.73, 1.26),
    64: (2.13, 1.34),
    128: (2.81, 1.45),
    192: (4.14, 1.58),
    256: (6.49, 1.69),
    512: (6.49, 1.69),
}
"""Prefetch buffer, MiB: decode and overall speed-up at 1024 prefill and 64K KV tokens."""

COLUMNS = ("prefill", "decode", "packing", "prefetch")


class PinnedFigure(NamedTuple):
    """A pinned number and its present value."""

    kind: str
    """`paper` (a printed figure) or `own` (a regression)."""
    name: str
    pinned: float
    ours: float
    """Present value with preset `paper`."""
    tolerance: float
    """Largest relative error."""
    real: float
    """Present value with preset `default`, for information."""

    @property
    def error(self) -> float:
        """Relative error of `ours`."""
        return self.ours / self.pinned - 1.0

    @property
    def ok(self) -> bool:
        return abs(self.error) <= self.tolerance

    def to_json(self) -> dict[str, Any]:
        return {**self._asdict(), "error": self.error, "ok": self.ok, "real_over_paper_preset": self.real / self.ours}


def pins() -> list[PinnedFigure]:
    """Compute all pins."""
    rows = [
        PinnedFigure("paper", f.claim, f.paper, f.ours("paper"), FIGURE_TOLERANCE, f.ours("default")) for f in FIGURES
    ]
    for (prefill, kv), wanted in TABLE_US.items():
        ours, real = layer_us("paper", prefill, kv), layer_us("default", prefill, kv)
        rows += [
            PinnedFigure("own", f"µs a layer, {prefill} prefill and {kv}K: {name}", want, a, TABLE_TOLERANCE, b)
            for name, want, a, b in zip(COLUMNS, wanted, ours, real, strict=True)
        ]
    for buffer_mib, curve in CURVE.items():
        ours2, real2 = _speedups("paper", buffer_mib), _speedups("default", buffer_mib)
        rows += [
            PinnedFigure("own", f"{part} speed-up, 1024 and 64K, {buffer_mib} MiB", want, a, CURVE_TOLERANCE, b)
            for part, want, a, b in zip(("decode", "overall"), curve, ours2, real2, strict=True)
        ]
    return rows


def layer_us(mode: Mode, prefill: int, kv_ki: int) -> tuple[float, float, float, float]:
    """Return the microseconds of the whole iteration divided by its layers (the LM head included)."""
    found, layers = stage(mode, prefill, kv_ki), setting(mode).shape.layers
    seconds = (found.prefill_s, found.decode_s, found.total_s("packing"), found.total_s("prefetch"))
    a, b, c, d = (s * 1e6 / layers for s in seconds)
    return a, b, c, d


def _speedups(mode: Mode, buffer_mib: int) -> tuple[float, float]:
    found = stage(mode, 1024, 64, buffer_mib)
    return found.decode_speedup("prefetch"), found.overall_speedup("prefetch")
