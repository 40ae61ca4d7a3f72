"""Mapping search for matrix products: tiles streamed from HBM, operand stationary in the arrays, split of the work.

A product of M rows, K deep and N wide is mapped by three choices:

- tiling of on-chip memory: inputs resident and weights streamed once; or 1 to 128 blocks of columns whose weights are
  resident while inputs stream by (inputs are read once a block); or 2 to 128 blocks of rows whose inputs are resident
  (weights are read once a block); or blocks of rows by blocks of columns whose sums are resident while K streams
  (inputs are read once a block of columns, weights once a block of rows). Tiles that stream are held twice where
  double-buffered.
- dataflow: the operand that is stationary in an array while the rest streams through it. Weights (rows stream:
  ceil(K/R) · ceil(N/C) tiles of max(M, R) cycles each, the R being the load of the next tile), outputs (K streams) or
  inputs (N streams).
- split: tiles over arrays, and the streamed dimension cut 1 to 16 ways where there are too few tiles. Arrays take
  different K-slabs of the same columns first, so partial sums need M × C accumulators, FP32.

Among the tilings that fit, the fewest HBM bytes win, then the fewest blocks; then the dataflow and split with the
fewest cycles. Minimising bytes rather than time makes the choice independent of bandwidth (see `OpCost`); cycles hardly
ever favour another tiling. All products of an iteration are searched as one array.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headway.core.errors import ConfigError
from headway_research.accelerator.machine import MIB, MachineModel


class OpCost(NamedTuple):
    """Cost of one operator.

    No field depends on bandwidth: a mapping is chosen for the fewest bytes, then the fewest cycles.
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


Floats = npt.NDArray[np.float64]

DATAFLOWS = ("weight-stationary", "output-stationary", "input-stationary")
SPLITS = (1, 2, 4, 8, 16)
BLOCKS = (1, 2, 4, 8, 16, 32, 64, 128)
# (kind, blocks of rows, blocks of columns)
TILINGS = (
    ("inputs resident", 1, 1),
    *(("column blocks", 1, b) for b in BLOCKS),
    *(("row blocks", b, 1) for b in BLOCKS[1:]),
    *(("output blocks", b, c) for b in BLOCKS for c in BLOCKS),
)
# Masks and factors over TILINGS, as rows: products are the other axis of the search.
BY_COLUMNS, BY_ROWS, BY_OUTPUTS = (
    np.array([kind == name for kind, _, _ in TILINGS])[None, :]
    for name in ("column blocks", "row blocks", "output blocks")
)
CUT_ROWS = np.array([float(rows) for _, rows, _ in TILINGS])[None, :]
CUT_COLUMNS = np.array([float(columns) for _, _, columns in TILINGS])[None, :]
SPLIT = np.array([float(split) for split in SPLITS])[None, :]
ACCUMULATOR_BYTES = 4


class GemmShape(NamedTuple):
    """A product of m rows, k deep and n wide."""

    name: str
    m: int
    n: int
    k: int
    outputs: int
    """Columns written out: half of n where a gate folds two."""
    weight_bytes: float
    """Bytes of one weight."""
    activation_bytes: float
    """Bytes of one activation."""
    input_on_chip: bool = False
    """The input comes from on-chip memory."""
    output_on_chip: bool = False
    """The output is kept in on-chip memory."""


def tile_bytes(machine: MachineModel, gemm: GemmShape) -> float:
    """Return the bytes of weights that fill all arrays once, at most those of the product."""
    return min(float(machine.macs), float(gemm.n * gemm.k)) * gemm.weight_bytes


def fusible(machine: MachineModel, gemm: GemmShape) -> bool:
    """Return whether input and output both fit on chip while weights stream through, double-buffered."""
    # Input and output activations; then FP32 sums of one tile of columns, and two weight tiles.
    held = gemm.m * (gemm.k + gemm.outputs) * gemm.activation_bytes
    return held + gemm.m * machine.columns * ACCUMULATOR_BYTES + 2 * tile_bytes(machine, gemm) <= machine.compute_bytes


class _TilingCosts(NamedTuple):
    """What each tiling of each product costs: arrays of products × tilings."""

    held: Floats
    """Bytes on chip."""
    moved: Floats
    """Bytes to and from memory; infinite where `held` does not fit."""
    blocks: Floats
    rows: Floats
    """Rows of a block."""
    columns: Floats
    """Columns of a block."""
    first: Floats
    """Bytes that the first tile needs before it computes; by product alone."""


def search(gemms: Sequence[GemmShape], machine: MachineModel, double_buffering: bool = True) -> list[OpCost]:
    """Return the best mapping of each product.

    Raises ConfigError where not even the smallest tiles fit the operand buffer."""
    if not gemms:
        return []
    costs = _tiling_costs(gemms, machine, double_buffering)
    least = costs.moved.min(axis=1)
    if not np.isfinite(least).all():
        at = int(np.argmin(np.isfinite(least)))
        raise ConfigError(
            f"machine.compute_buffer of {machine.compute_bytes / MIB:g} MiB cannot hold the tiles of "
            f"{gemms[at].name!r}; it needs at least {costs.held[at].min() / MIB:.3g} MiB"
        )
    # Among tilings of the fewest bytes the fewest blocks; argmin takes the first of equal ones.
    best = np.where(costs.moved <= least[:, None], costs.blocks, np.inf).argmin(axis=1)[:, None]

    def chosen(values: Floats) -> Floats:
        return np.take_along_axis(values, best, axis=1)

    k = np.array([[float(gemm.k)] for gemm in gemms])
    cycles = chosen(costs.blocks) * _cycles(machine, chosen(costs.rows), chosen(costs.columns), k)
    fastest = cycles.argmin(axis=1)
    fill = np.minimum(costs.first, least) if double_buffering else least
    # Cycles to fill and drain an array.
    ramp = machine.rows + machine.columns
    return [
        OpCost(
            gemm.name,
            "array",
            (float(cycles[i, fastest[i]]) + ramp) / machine.clock_hz,
            float(least[i]),
            float(fill[i]),
            float(costs.held[i, best[i, 0]]),
            _words(int(best[i, 0]), int(fastest[i])),
        )
        for i, gemm in enumerate(gemms)
    ]


def _tiling_costs(gemms: Sequence[GemmShape], machine: MachineModel, double_buffering: bool) -> _TilingCosts:
    # Tiles that stream are held twice where double-buffered.
    times = 2.0 if double_buffering else 1.0
    table = np.array(
        [
            (g.m, g.n, g.k, g.outputs, g.weight_bytes, g.activation_bytes, g.input_on_chip, g.output_on_chip)
            for g in gemms
        ],
        dtype=np.float64,
    )
    m, n, k, outputs, w, a, kept_in, kept_out = (table[:, i : i + 1] for i in range(table.shape[1]))
    weights, inputs, output = n * k * w, m * k * a, m * outputs * a
    tile = np.minimum(float(machine.macs), n * k) * w

    tm, tn = np.ceil(m / CUT_ROWS), np.ceil(n / CUT_COLUMNS)
    of_rows, of_columns = np.ceil(m / tm), np.ceil(n / tn)
    blocks = of_rows * of_columns
    # Weights are read once a block of rows, inputs once a block of columns; what is on chip is not moved.
    moved = weights * of_rows + inputs * (1.0 - kept_in) * of_columns + output * (1.0 - kept_out)
    slab = np.minimum(tm, float(machine.rows)) * k * a
    # On-chip bytes of each tiling. Row blocks hold their inputs twice: the next block loads while one is computed.
    resident = np.where(BY_ROWS, times, 1.0) * tm * k * a
    held = np.where(BY_COLUMNS, times * (tn * k * w + slab) + inputs * kept_in, times * tile + resident)
    held += tm * machine.columns * ACCUMULATOR_BYTES
    # Output blocks: sums resident, slabs of K stream.
    deep = np.minimum(k, float(machine.rows))
    sums = tm * tn * ACCUMULATOR_BYTES + times * deep * (tm * a * (1.0 - kept_in) + tn * w) + inputs * kept_in
    held = np.where(BY_OUTPUTS, sums, held) + output * kept_out

    moved = np.where(held <= machine.compute_bytes, moved, np.inf)
    first = tile[:, 0] + (np.minimum(m, float(machine.rows)) * machine.rows * a)[:, 0]
    return _TilingCosts(held, moved, blocks, tm, tn, first)


def _words(tiling: int, way: int) -> str:
    kind, rows, columns = TILINGS[tiling]
    cut = kind if kind == "inputs resident" else f"{rows} × {columns} {kind}" if kind == "output blocks" else ""
    cut = cut or f"{rows * columns} {kind}"
    split = SPLITS[way % len(SPLITS)]
    return f"{DATAFLOWS[way // len(SPLITS)]}, {cut}" + (f", split {split}" if split > 1 else "")


def _cycles(machine: MachineModel, m: Floats, n: Floats, k: Floats) -> Floats:
    """Return the cycles of one block: all splits of the first dataflow, then of the second, then of the third."""
    rows, columns, arrays = float(machine.rows), float(machine.columns), float(machine.arrays)
    deep, wide = np.ceil(k / rows), np.ceil(n / columns)

    # A tile costs the streamed dimension's length, at least `rows` cycles (the load of the next tile).
    def cycles(tiles: Floats, streamed: Floats) -> Floats:
        return np.asarray(np.ceil(tiles * SPLIT / arrays) * np.maximum(np.ceil(streamed / SPLIT), rows))

    by_weights = cycles(deep * wide, m)
    by_outputs = cycles(np.ceil(m / rows) * wide, k)
    by_inputs = cycles(deep * np.ceil(m / columns), n)
    return np.concatenate([by_weights, by_outputs, by_inputs], axis=1)
