"""Matrix products: tables of measured (k, n) with their staircases; for any other shape a roofline × fitted residual.

Roofline: t0 + max(2mkn / (peak · compute), bytes / (bandwidth · memory)). The residual is learned over the shape and
the waste of the last wave of tiles, for several tile shapes, because that waste makes the staircase.
"""

from __future__ import annotations

import msgspec
import numpy as np

from headway.core.errors import ConfigError
from headway.perf.hardware.accelerators import AcceleratorSpec, accelerator
from headway.perf.latency.operators.boosting import BoostedTrees, Matrix
from headway.perf.latency.operators.curves import Column, SizeCurve

T0_MS, COMPUTE, MEMORY = 0.006, 0.75, 0.85
"""Constants of the roofline: fixed milliseconds, shares of peak arithmetic and bandwidth. The residual absorbs their
error, so they need not be exact."""

_TILES = ((128, 128), (128, 256), (256, 128), (64, 128), (64, 64))
FEATURES = (
    *("m", "k", "n", "bound", "base"),
    *(f"waste{a}x{b}" for a, b in _TILES),
    *(f"{what}{a}x{b}" for a, b in _TILES[:3] for what in ("tiles", "waves")),
    *("pad128", "pad64", "slimness", "weights", "alignment", "vidur"),
)
LAYERS = "layers"
"""Library of layer profiles (Vidur's: PyTorch's products as its engines called them)."""


class LinearFit(msgspec.Struct, frozen=True):
    """Fitted matrix products of one die."""

    device: str
    """Name of the die."""
    curves: dict[str, SizeCurve]
    """`curves["k,n"]`: measured ms by rows."""
    trees: BoostedTrees
    """Log residual over the roofline for every other shape."""
    top: int
    """Most rows measured."""
    libraries: tuple[str, ...] = (LAYERS,)
    """Libraries whose products trained the residual, the one taken by default first: `LAYERS`, or an engine's name and
    version (`vllm-0.14.0`)."""

    def knows(self, k: int, n: int) -> bool:
        """Return whether this shape was measured."""
        return f"{k},{n}" in self.curves

    def library(self, wanted: str | None) -> str:
        """Return the library whose name begins with `wanted`; None: the default. Raises ConfigError for another one."""
        found = [each for each in self.libraries if wanted is None or each.startswith(wanted)]
        if not found:
            known = ", ".join(self.libraries)
            raise ConfigError(f"no matrix products of {wanted!r} were measured on {self.device}; there are: {known}")
        return found[0]

    def ms(self, m: Column, k: int, n: int, library: str | None = None) -> Column:
        """Return the milliseconds of an m × k by k × n product for each m, in the engine that `library` names (see
        `library`). Shapes of layer profiles are tables; all others are derived."""
        known = self.curves.get(f"{k},{n}")
        if known is None or self.library(library) != LAYERS:
            return self.derived_ms(m, k, n, library)
        time = known(m)
        # Beyond the measured rows: the roofline, scaled to meet the last measured time.
        beyond = m > known.top
        if beyond.any():
            device = accelerator(self.device)
            ends = np.array([known.top])
            scale = known(ends) / base_ms(device, ends, np.full(1, float(k)), np.full(1, float(n)))
            grown = scale * base_ms(device, m, np.full(m.size, float(k)), np.full(m.size, float(n)))
            time = np.where(beyond, grown, time)
        return time

    def derived_ms(self, m: Column, k: int, n: int, library: str | None = None) -> Column:
        """Return the milliseconds by roofline and residual, whether or not the shape was measured."""
        device = accelerator(self.device)
        kk, nn = np.full(m.size, float(k)), np.full(m.size, float(n))
        served = np.full(m.size, float(self.library(library) == LAYERS))
        return base_ms(device, m, kk, nn) * np.exp(self.trees(features(device, m, kk, nn, served)))


def base_ms(device: AcceleratorSpec, m: Column, k: Column, n: Column) -> Column:
    """Return the roofline in milliseconds (16-bit operands)."""
    arithmetic = 2 * m * k * n / (device.flops * COMPUTE)
    traffic = 2 * (m * k + k * n + m * n) / (device.bandwidth * MEMORY)
    return np.asarray(T0_MS + 1e3 * np.maximum(arithmetic, traffic), dtype=np.float64)


def features(device: AcceleratorSpec, m: Column, k: Column, n: Column, vidur: Column) -> Matrix:
    """Return the residual's features (rows × `FEATURES`): base-2 logarithms, rounded so that fits are the same on
    every platform. vidur: 1 for layer profiles, 0 for a general GEMM grid."""
    arithmetic = 2 * m * k * n / (device.flops * COMPUTE)
    traffic = 2 * (m * k + k * n + m * n) / (device.bandwidth * MEMORY)
    columns = [np.log2(m), np.log2(k), np.log2(n), np.log2(arithmetic / traffic)]
    columns.append(np.log2(np.maximum(arithmetic, traffic)))
    tiles = [np.ceil(m / rows) * np.ceil(n / cols) for rows, cols in _TILES]
    waves = [np.ceil(count / device.multiprocessors) for count in tiles]
    # Waste: outputs that whole waves of tiles could compute, over those wanted.
    for (rows, cols), count in zip(_TILES, waves, strict=True):
        columns.append(np.log2(count * device.multiprocessors * rows * cols / (m * n)))
    for at in range(3):
        columns += [np.log2(tiles[at]), np.log2(waves[at])]
    columns += [np.log2(np.ceil(m / 128) * 128 / m), np.log2(np.ceil(m / 64) * 64 / m)]
    columns += [np.log2(k / n), np.log2(k * n), np.log2(np.gcd(n.astype(np.int64), 4096)), vidur]
    return np.round(np.stack(columns, axis=1), 6)
