"""Fitted times of operators: matrix products, elementwise operators, collectives, attention.

Profiles are read and fitted by `headway_research.fit`; `device_fit` compiles the fits of one die to a table. A family
is a frozen struct, stored as JSON, that returns milliseconds as arrays.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec
import numpy as np
import numpy.typing as npt

from headway.core.errors import ConfigError
from headway.perf.hardware import AcceleratorSpec, NetworkLink, accelerator

# Measured times interpolated over one size or over head counts, and a small boosted regressor for what remains.

Column = npt.NDArray[np.float64]

UNIT_MS = 1e-4
"""Resolution of stored times: a tenth of a microsecond. Vidur's profiles resolve one microsecond."""


class SizeCurve(msgspec.Struct, frozen=True):
    """Values by size: log-log linear between knots, constant below the first, linear beyond the last.

    Beyond the last knot the slope is that of the last octave (fixed cost plus cost per unit of size)."""

    size: tuple[int, ...]
    """Sizes of the knots, ascending."""
    value: tuple[int, ...]
    """Values of the knots in multiples of `unit`."""
    unit: float = UNIT_MS
    """Milliseconds (or another unit) of one step of `value`."""

    def __call__(self, size: Column) -> Column:
        x, y = np.array(self.size, dtype=np.float64), self.values
        inside = np.exp(np.interp(np.log(np.maximum(size, 1e-9)), np.log(x), np.log(y)))
        beyond = size > x[-1]
        if beyond.any() and x.size > 1:
            # First knot of the last octave, but never the last knot itself.
            back = min(int(np.searchsorted(x, x[-1] / 2)), x.size - 2)
            slope = max(0.0, (y[-1] - y[back]) / (x[-1] - x[back]))
            inside = np.where(beyond, y[-1] + slope * (size - x[-1]), inside)
        return np.asarray(inside, dtype=np.float64)

    @property
    def values(self) -> Column:
        return np.array(self.value, dtype=np.float64) * self.unit

    @property
    def top(self) -> int:
        return self.size[-1]


Heads = tuple[int, int]
"""(query heads, KV heads) of one rank."""


def heads_of(key: str) -> Heads:
    """Return the heads of a key such as "32/8"."""
    q, kv = key.split("/")
    return int(q), int(kv)


def heads_key(heads: Heads) -> str:
    """Return the key of head counts, such as "32/8"."""
    return f"{heads[0]}/{heads[1]}"


def neighbours(wanted: Heads, measured: Iterable[str]) -> list[tuple[str, float]]:
    """Return up to three nearest measured head counts with weights that sum to 1; an exact match has weight 1.

    Weights are inverse squared distances, in octaves of query heads and (counting double) of the group size, the query
    heads per KV head."""
    found: list[tuple[float, str]] = []
    for key in measured:
        q, kv = heads_of(key)
        here = math.log2(wanted[0] / q)
        group = math.log2((wanted[0] / wanted[1]) / (q / kv))
        # Multi-head attention runs other kernels than grouped-query attention: three octaves apart.
        split = (wanted[0] == wanted[1]) != (q == kv)
        distance = here * here + 2 * group * group + (9.0 if split else 0.0)
        if distance == 0:
            return [(key, 1.0)]
        found.append((distance, key))
    found.sort()
    near = found[:3]
    total = sum(1 / d for d, _ in near)
    return [(key, 1 / d / total) for d, key in near]


# A small gradient-boosted regressor of symmetric trees, for the residual of a roofline.
#
# All nodes of one depth share one split (feature, threshold), so a tree is a few comparisons and a table of leaves:
# compact enough to ship as JSON, and evaluated as vectors without any library. Outside its fitted range the residual is
# constant, so the corrected roofline extrapolates by its own law. Deterministic: no sampling.

Matrix = npt.NDArray[np.float64]


class BoostedTrees(msgspec.Struct, frozen=True):
    """Sum of symmetric trees."""

    features: tuple[str, ...]
    """Names of the columns of x."""
    cuts: tuple[tuple[float, ...], ...]
    """`cuts[feature]`: thresholds of that feature, ascending."""
    questions: tuple[tuple[tuple[int, int], ...], ...]
    """`questions[tree][depth]`: (feature, index into its cuts) of the split at that depth."""
    leaves: tuple[tuple[int, ...], ...]
    """`leaves[tree][bits]` in units of 1e-4; bits of `x[feature] > cut`, the first split's most significant."""

    def __call__(self, x: Matrix) -> Column:
        """Return the predicted residual of each row of `x` (rows × features)."""
        total = np.zeros(x.shape[0])
        for asked, leaves in zip(self.questions, self.leaves, strict=True):
            node = np.zeros(x.shape[0], dtype=np.int64)
            for feature, cut in asked:
                node = 2 * node + (x[:, feature] > self.cuts[feature][cut])
            total += np.array(leaves, dtype=np.float64)[node]
        return total * 1e-4


# Fitted times of matrix products, of elementwise operators and of collectives.
#
# Roofline: t0 + max(2mkn / (peak · compute), bytes / (bandwidth · memory)). The residual is learned over the shape and
# the waste of the last wave of tiles, for several tile shapes, because that waste makes the staircase.

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


# Fitted times of attention: of prefill chunks, of decodes, and of several prompts in one batch.
#
# Beyond the measured chunks time continues as a parabola (`_tail`).
#
# b is one curve over rows × query heads, the number of tiles that fill the device: in the profiles it is the same for
# 16 heads with 512 rows, 64 with 128 and 128 with 64 (H800, within 2%). Below a full device it is flat, because one
# tile walks the whole cache alone; kernels that split KV are not bound by this (`split_ms`). Times are linear in the
# cached tokens within 2-3% up to 4× beyond the fitted range; no public profile goes further.

# Attention of decodes, by number of requests and cached tokens of each.
#
# A grid of measured times over (requests, cached tokens each), bilinear in logarithms. Beyond it time grows with the
# bytes read, from the bandwidth that the kernel reaches at the grid's edge: a single request of few KV heads reads at a
# fraction of what a full batch does, however long its history. How that bandwidth still rises with bytes (A100: a share
# of 0.26 at 10-50 MB, 0.74 beyond 300 MB) is the median over all grids of the source. The slope at the edge is not
# used: kernels change how they split a history in steps, and one step would be carried on for ever.

MOST_EFFICIENT = 0.95
"""Largest share of peak bandwidth that is extrapolated to. A greater one measured means that bytes are miscounted
(Frontier's 405B profile holds FP8 KV)."""


class DecodeGrid(msgspec.Struct, frozen=True):
    """Measured times of one source and head count."""

    counts: tuple[int, ...]
    """Numbers of requests, ascending."""
    past: tuple[int, ...]
    """Cached tokens of each request, ascending."""
    ms: tuple[tuple[float, ...], ...]
    """`ms[i][j]`: counts[i] requests of past[j] cached tokens each."""


class BandwidthGrowth(msgspec.Struct, frozen=True):
    """How the bandwidth that a source's kernels reach rises with the bytes of a read."""

    log2_bytes: tuple[float, ...]
    """Bytes of KV in a read, as base-2 logarithms, ascending."""
    gain: tuple[float, ...]
    """Natural logarithm of the bandwidth relative to that at the first entry; constant beyond both ends."""

    def __call__(self, moved: Column) -> Column:
        return np.asarray(np.interp(np.log2(np.maximum(moved, 1.0)), self.log2_bytes, self.gain), dtype=np.float64)


class DecodeFit(msgspec.Struct, frozen=True):
    """Decode attention of one die, by source (kernel library) and head counts."""

    device: str
    """Name of the die."""
    head_dim: int
    """Head dimension that the grids hold for."""
    grids: dict[str, dict[str, DecodeGrid]]
    """`grids[source][heads]`."""
    tails: dict[str, float]
    """`tails[source]`: share of peak bandwidth that large reads reach. Per source, because kernels differ: on H100
    vLLM's reach 0.93 and those of Frontier's profile 0.50."""
    growth: dict[str, BandwidthGrowth]
    """`growth[source]`: for reads larger than those of a grid."""
    cached: dict[str, float] = {}
    """`cached[source]`: most bytes that are read from a cache, faster than the memory can (L40S: 96 MB, at twice the
    memory's bandwidth); none: no such read was measured."""

    def ms(self, count: Column, past: Column, heads: Heads, source: str) -> Column:
        """Return the milliseconds of `count` requests with `past` cached tokens each (elementwise over both)."""
        measured = self.grids[source]
        # A stand-in is read at the count that gives it as many KV heads in all: the same bytes, the same tiles.
        total = np.zeros(count.size)
        for key, weight in neighbours(heads, measured):
            kv = int(key.split("/")[1])
            total += weight * np.log(self._grid_ms(measured[key], count * (heads[1] / kv), past, kv, source))
        return np.asarray(np.exp(total), dtype=np.float64)

    def _grid_ms(self, grid: DecodeGrid, count: Column, past: Column, kv: int, source: str) -> Column:
        # past + 1: the logarithm of an empty history is 0.
        table = np.log(np.array(grid.ms))
        lc, lp = np.log(np.array(grid.counts, dtype=np.float64)), np.log(np.array(grid.past, dtype=np.float64) + 1)
        c, p = np.log(np.maximum(count, 1.0)), np.log(past + 1)
        cc, pp = np.clip(c, lc[0], lc[-1]), np.clip(p, lp[0], lp[-1])
        i = np.clip(np.searchsorted(lc, cc, side="right") - 1, 0, max(lc.size - 2, 0))
        j = np.clip(np.searchsorted(lp, pp, side="right") - 1, 0, max(lp.size - 2, 0))
        u = (cc - lc[i]) / (lc[i + 1] - lc[i])
        v = (pp - lp[j]) / (lp[j + 1] - lp[j])
        time = np.exp(
            (1 - u) * ((1 - v) * table[i, j] + v * table[i, j + 1])
            + u * ((1 - v) * table[i + 1, j] + v * table[i + 1, j + 1])
        )
        # Outside: at the nearest edge, and from there by bytes.
        inside = np.maximum(np.exp(pp) - 1, 1.0)
        edge, wanted = np.exp(cc) * inside, np.exp(c) * np.maximum(np.exp(p) - 1, inside)
        bandwidth = accelerator(self.device).bandwidth
        cached = self.cached.get(source, 0.0)
        time = time * longer_reads(edge, wanted, time, kv * self.head_dim, bandwidth, self.growth[source], cached)
        # A read that outgrows the cache comes from memory, all of it: the cache's speed does not go on.
        token_bytes = 4.0 * kv * self.head_dim
        leaves = (edge * token_bytes <= cached) & (cached < wanted * token_bytes)
        memory_ms = wanted * token_bytes / self.speed(source) * 1e3
        return np.asarray(np.where(leaves, np.maximum(time, memory_ms), time), dtype=np.float64)

    def speed(self, source: str) -> float:
        """Return the bytes/s at which a source's kernels read long histories."""
        return accelerator(self.device).bandwidth * self.tails[source]


def longer_reads(
    tokens: Column,
    wanted: Column,
    ms: Column,
    width: int,
    bandwidth: float,
    growth: BandwidthGrowth,
    cached: float = 0.0,
) -> Column:
    """Return the factor by which `wanted` KV tokens take longer than `tokens`, which take `ms` (elementwise).

    width: elements of a token's keys. bandwidth: the device's peak, bytes/s, which the rise of the bandwidth reached
    stays below, but for reads of at most `cached` bytes."""
    token_bytes = 4.0 * width  # keys and values of 2 bytes each
    reached = tokens * token_bytes / (ms * 1e-3 * bandwidth)
    gain = growth(wanted * token_bytes) - growth(tokens * token_bytes)
    most = np.where(wanted * token_bytes <= cached, np.inf, np.maximum(np.log(MOST_EFFICIENT / reached), 0.0))
    return np.asarray(wanted / tokens * np.exp(-np.minimum(gain, most)), dtype=np.float64)


# Attention of several prompts in one batch, which is less than the sum of each alone.
#
# A short chunk leaves most of the device idle, and the next one fills what it left. The first costs its time alone,
# each further one a share of it, its marginal share: a curve over chunk × query heads, the number of tiles, as in
# `prefill`.


class BatchedPrefill(msgspec.Struct, frozen=True):
    """Marginal share of a further prompt in a batch, of one kernel library on one die."""

    log2_tiles: tuple[float, ...]
    """log2(chunk × query heads), ascending."""
    share: tuple[float, ...]
    """Time that a further chunk adds over its time alone; constant beyond both ends."""

    def shares(self, chunk: Column, q_heads: Column | int) -> Column:
        """Return the share of each chunk, non-decreasing in its tokens."""
        return np.interp(np.log2(chunk * q_heads), self.log2_tiles, self.share)

    def batch_ms(self, alone_ms: Column, batch: Column, chunk: Column, q_heads: Column) -> Column:
        """Return the milliseconds of `batch` equal chunks that take `alone_ms` alone (elementwise)."""
        return np.asarray(alone_ms * (1.0 + (batch - 1.0) * self.shares(chunk, q_heads)), dtype=np.float64)


HEAD_DIM = 128
_COMPUTE = 0.6
_WALK_BYTES = 2e4
"""Time of a tile's walk over one token, as bytes at the device's bandwidth (10 ns on an A100), as measured."""
_SPLIT_ROWS = 64


class PrefillFit(msgspec.Struct, frozen=True):
    """Prefill attention of one die, by source (kernel library) and head counts."""

    device: str
    """Name of the die."""
    own: dict[str, dict[str, SizeCurve]]
    """`own[source][heads]`: ms by chunk, at past 0, batch 1."""
    over: dict[str, dict[str, tuple[SizeCurve, SizeCurve]]]
    """`over[source][heads]`: (ms over an empty prefix, ns for each cached token) by chunk, of the heads measured."""
    slope: SizeCurve | None
    """ns for each cached token by rows × query heads, over all sources and heads."""
    best: float
    """FLOP/s that the slope reaches on a full device."""
    past: int
    """Longest prefix measured, in tokens."""
    chunk: int
    """Longest chunk measured, in tokens."""
    batched: BatchedPrefill | None = None
    """Several prompts in a batch, of the preferred library; None where that was not measured."""

    def own_ms(self, chunk: Column, heads: Heads, source: str) -> Column:
        """Return the milliseconds of a chunk's attention within itself."""
        measured = self.own[source]
        factor = np.zeros(chunk.size)
        floor = 0.0
        for key, weight in neighbours(heads, measured):
            part, low = self._factor(chunk, measured[key], int(key.split("/")[0]))
            factor += weight * part
            floor += weight * low
        return np.asarray(np.exp(factor) * (floor + _work_ms(self.device, chunk, heads[0])), dtype=np.float64)

    def _factor(self, chunk: Column, measured: SizeCurve, q_heads: int) -> tuple[Column, float]:
        """Return (logarithm of time over floor + work, that floor).

        Beyond the last measured chunk time grows as the parabola through the last two octaves does."""
        at, ms = np.array(measured.size, dtype=np.float64), measured.values
        low = float(ms.min())
        base = low + _work_ms(self.device, chunk, q_heads)
        logs = np.log(ms / (low + _work_ms(self.device, at, q_heads)))
        time = np.exp(np.interp(np.log(np.maximum(chunk, 1.0)), np.log(at), logs)) * base
        if (chunk > at[-1]).any():
            linear, square = _tail(at, ms)
            time = np.where(
                chunk > at[-1], ms[-1] + linear * (chunk - at[-1]) + square * (chunk**2 - at[-1] ** 2), time
            )
        return np.asarray(np.log(time / base), dtype=np.float64), low

    def prefix_ms(self, chunk: Column, heads: Heads, source: str) -> Column:
        """Return the milliseconds that any prefix adds to a chunk (another kernel, or its set-up); 0 if not measured.

        Below the least chunk measured over a prefix, time shrinks in proportion to the chunk's attention within itself.
        """
        found = self.over.get(source, {}).get(heads_key(heads))
        if found is None:
            return np.zeros(chunk.size)
        own, least = self.own_ms(chunk, heads, source), np.array([float(found[0].size[0])])
        smaller = np.where(chunk < least, own / self.own_ms(least, heads, source), 1.0)
        return np.maximum(found[0](np.maximum(chunk, 1.0)) * smaller - own, 0.0)

    def slope_ms(self, chunk: Column, heads: Heads, source: str = "") -> Column:
        """Return the milliseconds for each cached token.

        Of these heads and this source where measured, else of all by number of tiles; by arithmetic where no profile
        has a prefix."""
        # 1e-6: curves hold ns. Beyond their last knot the slope is proportional to the rows.
        found = self.over.get(source, {}).get(heads_key(heads))
        if found is not None:
            top = found[1].top
            return np.asarray(
                found[1](np.clip(chunk, 1.0, top)) * 1e-6 * np.maximum(chunk / top, 1.0), dtype=np.float64
            )
        work = np.maximum(chunk, 1.0) * heads[0]
        if self.slope is None:
            return 4e3 * work * HEAD_DIM / self.best
        top = self.slope.top
        grown = np.maximum(work / top, 1.0)
        return np.asarray(self.slope(np.minimum(work, top)) * 1e-6 * grown, dtype=np.float64)

    def split_ms(self, chunk: Column, heads: Heads, bandwidth: float) -> Column:
        """Return `slope_ms` of kernels that split KV over the whole device (FlashInfer, FlashAttention; Medha §4.2).

        The larger of arithmetic of whole 64-row tiles a KV head at the best measured rate, and of reading KV at
        `bandwidth` bytes/s; at most the measured slope."""
        rows = np.ceil(np.maximum(chunk, 1.0) * heads[0] / heads[1] / _SPLIT_ROWS) * _SPLIT_ROWS
        arithmetic = 4e3 * rows * heads[1] * HEAD_DIM / self.best
        reading = 4e3 * heads[1] * HEAD_DIM / bandwidth
        return np.asarray(np.minimum(np.maximum(arithmetic, reading), self.slope_ms(chunk, heads)), dtype=np.float64)


def _tail(at: Column, ms: Column) -> tuple[float, float]:
    """Return (ms a token, ms a token squared) over the last two octaves: relative least squares, no negative term."""
    # The last two octaves, and at least the last four points.
    last = at >= min(at[-1] / 4, at[max(at.size - 4, 0)])
    x, y = at[last], ms[last]
    # The first set of powers whose solution has no negative slope and leaves a point over.
    for powers in ((0, 1, 2), (0, 2), (1, 2)):
        a = np.stack([x**p for p in powers], axis=1)
        scale = a.max(axis=0)
        found, *_ = np.linalg.lstsq(a / scale / y[:, None], np.ones_like(y), rcond=None)
        terms = dict(zip(powers, found / scale, strict=True))
        if terms[2] > 0 and terms.get(1, 0.0) >= 0 and len(x) > len(powers):
            return float(terms.get(1, 0.0)), float(terms[2])
    return 0.0, float(ms[-1] / at[-1] ** 2)


def _work_ms(device: str, chunk: Column, q_heads: int) -> Column:
    """Return the milliseconds of all tiles' arithmetic plus the last tile's walk over the chunk.

    The walk dominates when few heads leave the device idle."""
    # 4 FLOPs a head dimension and pair, chunk·(chunk + 1)/2 pairs, in milliseconds.
    own = accelerator(device)
    arithmetic = 2e3 * q_heads * HEAD_DIM * chunk * (chunk + 1) / (own.flops * _COMPUTE)
    return np.asarray(arithmetic + 1e3 * _WALK_BYTES * chunk / own.bandwidth, dtype=np.float64)
