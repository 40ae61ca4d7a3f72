"""Fitted times of matrix products, of elementwise operators and of collectives.

Roofline: t0 + max(2mkn / (peak · compute), bytes / (bandwidth · memory)). The residual is learned over the shape and
the waste of the last wave of tiles, for several tile shapes, because that waste makes the staircase.
"""

from __future__ import annotations

import msgspec
import numpy as np

from headway.core.errors import ConfigError
from headway.perf.hardware import AcceleratorSpec, NetworkLink, accelerator
from headway.perf.latency.operators.curves import BoostedTrees, Column, Matrix, SizeCurve

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
    """Libraries whose products trained the residual: `LAYERS`, or an engine's name and version (`vllm-0.14.0`)."""

    def knows(self, k: int, n: int) -> bool:
        """Return whether this shape was measured."""
        return f"{k},{n}" in self.curves

    def library(self, wanted: str) -> str:
        """Return the library whose name begins with `wanted`; the first one where none does."""
        return next((each for each in self.libraries if each.startswith(wanted)), self.libraries[0])

    def ms(self, m: Column, k: int, n: int, library: str = LAYERS) -> Column:
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

    def derived_ms(self, m: Column, k: int, n: int, library: str = LAYERS) -> Column:
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


OPS = ("input_layernorm", "attn_rope", "post_attention_layernorm", "mlp_act", "add", "emb")


class ElementwiseFit(msgspec.Struct, frozen=True):
    """Fitted elementwise operators of one die."""

    curves: dict[str, dict[str, SizeCurve]]
    """`curves[op][width]`: ms by tokens; width: elements a row."""

    def ms(self, op: str, tokens: Column, width: int) -> Column:
        """Return the milliseconds of `op` on `tokens` rows of `width` elements.

        A width between two measured ones is interpolated (log time over log width); outside the measured widths, rows
        are converted to rows of the nearest one with the same number of elements."""
        known = self.curves[op]
        if str(width) in known:
            return known[str(width)](tokens)
        widths = np.array(sorted(int(w) for w in known))
        at = int(np.searchsorted(widths, width))
        if at in (0, widths.size):
            # At least one row of the measured width: below it lies only the fixed cost.
            edge = int(widths[min(at, widths.size - 1)])
            return known[str(edge)](np.maximum(tokens * width / edge, 1.0))
        low, high = int(widths[at - 1]), int(widths[at])
        share = (np.log(width) - np.log(low)) / (np.log(high) - np.log(low))
        both = (1 - share) * np.log(known[str(low)](tokens)) + share * np.log(known[str(high)](tokens))
        return np.asarray(np.exp(both), dtype=np.float64)


# All-reduce, send and other collectives: cost by bytes, for each number of workers, inside a node or across nodes.
#
# Times between two measured sizes are interpolated in logarithms.

PREFERENCE = ("vllm_graph", "nccl", "vidur", "vllm_eager")
"""Sources in order of preference: the collectives that a serving engine runs under CUDA graphs come first.
`vidur`: its all-to-all NVLink nodes (`dgx`), without launch overhead."""


class CollectiveFit(msgspec.Struct, frozen=True):
    """Fitted collectives of one device."""

    curves: dict[str, dict[str, dict[str, SizeCurve]]]
    """`curves[op][source][workers]`: ms by bytes; the key of workers across nodes ends in "+"."""

    def curve(self, op: str, workers: int, across: bool = False, source: str | None = None) -> SizeCurve | None:
        """Return the curve of `source` (None: the preferred one), or None when it was not measured."""
        key = f"{workers}{'+' if across else ''}"
        sources = self.curves.get(op, {})
        for name in (source,) if source else sorted(sources, key=_rank):
            if name in sources and key in sources[name]:
                return sources[name][key]
        return None

    def source(self, op: str, workers: int) -> str | None:
        """Return the preferred source inside a node that measured so many workers; None: there is none."""
        by_name = self.curves.get(op, {})
        return next((name for name in sorted(by_name, key=_rank) if str(workers) in by_name[name]), None)

    def ms(self, op: str, count: Column, workers: int, across: bool = False, source: str | None = None) -> Column:
        """Return the milliseconds for `count` bytes. Raises ConfigError when no number of workers was measured.

        An unmeasured number of workers w takes the nearest measured one (in logarithms), scaled as in a ring: (w-1)/w
        of the bytes cross each link."""
        found = self.curve(op, workers, across, source)
        if found is not None:
            return found(count)
        known = [w for w in range(2, 129) if self.curve(op, w, across) is not None]
        if not known:
            raise ConfigError(f"no measurement of {op} {'across nodes' if across else 'inside a node'}")
        near = min(known, key=lambda w: abs(np.log(w / workers)))
        other = self.curve(op, near, across)
        assert other is not None
        return np.asarray(other(count) * ((workers - 1) / workers) / ((near - 1) / near), dtype=np.float64)


def ring_all_reduce_ms(link: NetworkLink, sent: Column, workers: Column | int) -> Column:
    """Return the milliseconds of a ring all-reduce of `sent` bytes, by the link's data sheet.

    Reduce-scatter and all-gather, each passing (workers - 1) / workers of the bytes over every link."""
    ring = 2 * (workers - 1) / workers * sent / (link.bytes_per_s * link.efficiency)
    return np.asarray(1e3 * (2 * link.latency_s + ring), dtype=np.float64)


def _rank(source: str) -> tuple[int, str]:
    first = next((i for i, name in enumerate(PREFERENCE) if source.startswith(name)), len(PREFERENCE))
    return first + (10 if "pairwise" in source else 0), source
