"""Fit operator profiles of one accelerator's die: one fit for each family of operators, and the file that holds them.

Each section reads the profiles of one family. Fits are medians, so that repeats and outliers have no weight, and
deterministic: the same profiles give the same bytes. What a fit computes, and how it extrapolates, is in
`headway.perf.latency.operators`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from headway.core.errors import ConfigError
from headway.perf.hardware import accelerator
from headway.perf.latency.device_fit import DeviceFit, preferred_source
from headway.perf.latency.operators import (
    FEATURES,
    HEAD_DIM,
    LAYERS,
    MOST_EFFICIENT,
    UNIT_MS,
    BandwidthGrowth,
    BatchedPrefill,
    BoostedTrees,
    CollectiveFit,
    Column,
    DecodeFit,
    DecodeGrid,
    ElementwiseFit,
    Heads,
    LinearFit,
    Matrix,
    PrefillFit,
    SizeCurve,
    base_ms,
    features,
    heads_key,
    longer_reads,
)
from headway_research.fit.readers import COLLECTIVE, DECODE, ELEMENTWISE, LINEAR, PREFILL, OperatorProfile

_T = TypeVar("_T")

TILE = 64
"""Rows after which matrix products start another tile (times step there; 128 is a multiple)."""

_NOISE_MS = 6e-4
"""Thinning may always move a time by this much: less than the resolution of what was measured."""

_BINS = 64

_GRID_WEIGHT = 0.1
"""Weight of a point of a general GEMM grid relative to a layer profile's: the grid is of another library version."""

# Bytes up to which vLLM's own all-reduce is used.
_SWITCH = 8 << 20

# A time this many times above a larger message's is taken to be disturbed, not noise.
_DISTURBED = 1.1

_DEFAULT_SLOPE = 0.5

LARGE_BYTES = 3e8
"""KV bytes from which on a read reaches the device's bandwidth for large reads."""

_DEFAULT_TAIL = 0.8

_HEAD_DIM = 128

_SHORT_PAST = 1000
"""Histories below this say more about a kernel's start than about its bandwidth."""


def curve(size: Column, value: Column, tolerance: float = 0.0, steps: bool = False, unit: float = UNIT_MS) -> SizeCurve:
    """Fit a curve through all points.

    steps: between two sizes with a tile's edge between them, time steps at that edge if it grows by more than 4%.
    tolerance: relative error that leaving out knots may cause."""
    order = np.argsort(size)
    x, y = size[order], value[order]
    if steps:
        x, y = _stepped(x, y)
    if tolerance:
        # Values are positive, so relative errors are differences of logarithms.
        keep = _thin(np.log(x), np.log(y), np.maximum(tolerance, _NOISE_MS / y if unit == UNIT_MS else 0.0))
        x, y = x[keep], y[keep]
    return SizeCurve(tuple(round(float(v)) for v in x), tuple(max(1, round(float(v) / unit)) for v in y), unit)


def _stepped(x: Column, y: Column) -> tuple[Column, Column]:
    # First tile edge at or after each size.
    edge = np.ceil(x[:-1] / TILE) * TILE
    # Growth between sizes further apart shows no step; sizes within the first tile cost as much as all of it.
    near = (x[1:] - x[:-1] <= TILE) & ((x[1:] < 1.6 * x[:-1]) | (x[:-1] < TILE))
    at = np.flatnonzero((edge + 1 < x[1:]) & (y[1:] > 1.04 * y[:-1]) & near)
    new_x, new_y = [x], [y]
    for i in at:
        # Constant up to the edge, then the larger size's time from the row after it.
        if edge[i] > x[i]:
            new_x.append(edge[i : i + 1])
            new_y.append(y[i : i + 1])
        new_x.append(edge[i : i + 1] + 1)
        new_y.append(y[i + 1 : i + 2])
    xs, ys = np.concatenate(new_x), np.concatenate(new_y)
    order = np.argsort(xs, kind="stable")
    return xs[order], ys[order]


def _thin(x: Column, y: Column, tolerance: Column) -> list[int]:
    """Return the indices of knots to keep so that linear interpolation is within `tolerance` (Douglas-Peucker)."""
    allowed = np.broadcast_to(tolerance, x.shape)
    keep = {0, x.size - 1}
    spans = [(0, x.size - 1)]
    while spans:
        low, high = spans.pop()
        if high - low < 2:
            continue
        line = y[low] + (y[high] - y[low]) * (x[low:high] - x[low]) / (x[high] - x[low])
        off = np.abs(line - y[low:high]) / allowed[low:high]
        worst = int(np.argmax(off))
        if off[worst] > 1.0:
            keep.add(low + worst)
            spans += [(low, low + worst), (low + worst, high)]
    return sorted(keep)


def fit_trees(
    features: tuple[str, ...],
    x: Matrix,
    y: Column,
    *,
    weight: Column | None = None,
    trees: int = 200,
    depth: int = 5,
    rate: float = 0.12,
    ridge: float = 8.0,
) -> BoostedTrees:
    """Fit y (log residuals, so that errors are relative) by squared loss.

    rate: learning rate. ridge: weight of points at 0 added to every leaf."""
    # side="left": a bin number above i means x > cuts[i], the comparison of `BoostedTrees.__call__`.
    cuts = [_cuts(x[:, j]) for j in range(x.shape[1])]
    binned = [np.searchsorted(cuts[j], x[:, j], side="left") for j in range(x.shape[1])]
    w = np.ones_like(y) if weight is None else weight / weight.mean()
    rest = y.copy()
    questions: list[tuple[tuple[int, int], ...]] = []
    leaves: list[tuple[int, ...]] = []
    for _ in range(trees):
        node = np.zeros(y.size, dtype=np.int64)
        asked: list[tuple[int, int]] = []
        for level in range(depth):
            # One split for all 2^level nodes of this depth.
            best = _best_question(node, 1 << level, binned, cuts, w, rest, ridge)
            if best is None:
                break
            asked.append(best)
            node = 2 * node + (binned[best[0]] > best[1])
        if not asked:
            break
        count = np.bincount(node, w, 1 << len(asked))
        total = np.bincount(node, w * rest, 1 << len(asked))
        # Rounded before the residual is updated, so that later trees correct the rounding.
        values = np.round(rate * total / (count + ridge) * 1e4)
        rest -= values[node] * 1e-4
        questions.append(tuple(asked))
        leaves.append(tuple(int(v) for v in values))
    return BoostedTrees(features, tuple(tuple(float(c) for c in cut) for cut in cuts), tuple(questions), tuple(leaves))


def _cuts(column: Column) -> Column:
    values = np.unique(column)
    if values.size <= 1:
        return np.zeros(0)
    middles = (values[1:] + values[:-1]) / 2
    # Too many distinct values: thresholds at quantiles, each with as many points between.
    if middles.size > _BINS:
        middles = np.unique(np.quantile(column, np.linspace(0, 1, _BINS + 2)[1:-1]))
    return np.asarray(np.round(middles, 4), dtype=np.float64)


def _best_question(
    node: npt.NDArray[np.int64],
    nodes: int,
    binned: list[npt.NDArray[np.int64]],
    cuts: list[Column],
    w: Column,
    rest: Column,
    ridge: float,
) -> tuple[int, int] | None:
    best: tuple[int, int] | None = None
    score = -np.inf
    wr = w * rest
    for j, bins in enumerate(binned):
        size = cuts[j].size + 1
        if size < 2:
            continue
        # Cumulative sums by bin give every threshold's left side at once: residual g, weight c, by node.
        at = node * size + bins
        g = np.bincount(at, wr, nodes * size).reshape(nodes, size).cumsum(axis=1)
        c = np.bincount(at, w, nodes * size).reshape(nodes, size).cumsum(axis=1)
        gl, cl = g[:, :-1], c[:, :-1]
        gr, cr = g[:, -1:] - gl, c[:, -1:] - cl
        gain = (gl**2 / (cl + ridge) + gr**2 / (cr + ridge)).sum(axis=0)
        top = int(np.argmax(gain))
        # The margin makes the first feature win a tie, whatever the rounding of the platform.
        if gain[top] > score + 1e-12:
            best, score = (j, top), float(gain[top])
    return best


def fit_linear(device: str, profiles: Sequence[OperatorProfile], tolerance: float = 0.0, trees: int = 250) -> LinearFit:
    """Fit all profiles of one device.

    Shapes measured by several models or operators become one curve (median by rows); shapes of a general GEMM grid
    train the residual only, since their steps in m are too coarse for a table."""
    own = accelerator(device)
    curves: dict[str, SizeCurve] = {}
    layer = [p for p in profiles if p.op != "gemm"]
    points: dict[tuple[int, int], dict[float, list[float]]] = {}
    for p in layer:
        for m, k, n, ms in zip(p.x["m"], p.x["k"], p.x["n"], p.ms, strict=True):
            points.setdefault((int(k), int(n)), {}).setdefault(float(m), []).append(float(ms))
    for (k, n), times in sorted(points.items()):
        rows = np.array(sorted(times))
        ms_of = np.array([float(np.median(times[r])) for r in rows])
        curves[f"{k},{n}"] = curve(rows, ms_of, tolerance, steps=True)
    m, k_, n_, y = (np.concatenate([p.x[c] if c else p.ms for p in profiles]) for c in ("m", "k", "n", ""))
    vidur = np.concatenate([np.full(len(p), float(p.op != "gemm")) for p in profiles])
    target = np.log(y / base_ms(own, m, k_, n_))
    weight = np.where(vidur == 1, 1.0, _GRID_WEIGHT)
    fitted = fit_trees(FEATURES, features(own, m, k_, n_, vidur), target, weight=weight, trees=trees)
    top = int(max((p.x["m"].max() for p in layer), default=m.max()))
    grids = sorted({p.source for p in profiles if p.op == "gemm"})
    return LinearFit(device, curves, fitted, top, (*([LAYERS] if layer else []), *grids))


def fit_elementwise(profiles: Sequence[OperatorProfile], tolerance: float = 0.0) -> ElementwiseFit:
    """Fit one curve per operator and width, over all models with that width (median by tokens)."""
    points: dict[str, dict[int, dict[float, list[float]]]] = {}
    for p in profiles:
        for tokens, width, ms in zip(p.x["tokens"], p.x["width"], p.ms, strict=True):
            points.setdefault(p.op, {}).setdefault(int(width), {}).setdefault(float(tokens), []).append(float(ms))
    curves: dict[str, dict[str, SizeCurve]] = {}
    for op, widths in sorted(points.items()):
        for width, times in sorted(widths.items()):
            sizes = np.array(sorted(times))
            middle = np.array([float(np.median(times[s])) for s in sizes])
            curves.setdefault(op, {})[str(width)] = curve(sizes, middle, tolerance)
    return ElementwiseFit(curves)


def fit_collectives(profiles: Sequence[OperatorProfile], tolerance: float = 0.0) -> CollectiveFit:
    """Fit curves through the medians of up to 48 size classes, so that single outliers of dense grids have no weight.

    Two corrections apply where few sizes were measured. A larger message is never faster, so a size that took longer
    than a larger one was disturbed. Time that grows faster than bytes means that another algorithm takes over: both
    sides are extrapolated up to the switch (vLLM's own all-reduce serves messages below 8 MiB by default, NCCL larger
    ones; elsewhere the switch is assumed at the larger size). tolerance: relative error that thinning the knots may
    cause."""
    curves: dict[str, dict[str, dict[str, SizeCurve]]] = {}
    for p in profiles:
        for workers in np.unique(p.x["workers"]):
            for across in np.unique(p.x["across"]):
                rows = (p.x["workers"] == workers) & (p.x["across"] == across)
                if not rows.any():
                    continue
                size, ms = _classes(p.x["bytes"][rows], p.ms[rows])
                key = f"{int(workers)}{'+' if across else ''}"
                curves.setdefault(p.op, {}).setdefault(p.source, {})[key] = curve(size, ms, tolerance)
    return CollectiveFit(curves)


def _classes(size: Column, ms: Column, most: int = 48) -> tuple[Column, Column]:
    if size.size <= most:
        order = np.argsort(size)
        return _switched(*_undisturbed(size[order], ms[order]))
    # Half of the class edges at quantiles (where sizes are dense), half evenly over the logarithm of size.
    edges = np.unique(np.quantile(np.log(size), np.linspace(0, 1, most // 2 + 1)))
    edges = np.unique(np.concatenate([edges, np.linspace(np.log(size.min()), np.log(size.max()), most // 2 + 1)]))
    which = np.clip(np.searchsorted(edges, np.log(size), side="right") - 1, 0, edges.size - 2)
    classes = np.unique(which)
    middle = np.array([np.exp(np.mean(np.log(size[which == c]))) for c in classes])
    return middle, np.array([np.median(ms[which == c]) for c in classes])


def _undisturbed(size: Column, ms: Column) -> tuple[Column, Column]:
    """Lower each time that exceeds a larger message's by more than noise to the least of those."""
    least = np.minimum.accumulate(ms[::-1])[::-1]
    return size, np.where(ms > _DISTURBED * least, least, ms)


def _switched(size: Column, ms: Column) -> tuple[Column, Column]:
    """Add knots on both sides of a switch of algorithms, wherever time grows by more than bytes do."""
    x, y = np.log(size), np.log(ms)
    more_x, more_y = [x], [y]
    for i in np.flatnonzero(np.diff(y) > 1.05 * np.diff(x)):
        inside = size[i] < _SWITCH < size[i + 1]
        at = np.log(_SWITCH if inside else size[i + 1])
        # Just below the switch: the smaller sizes' slope goes on, but never above the larger size's time.
        if i > 0:
            slope = np.clip((y[i] - y[i - 1]) / (x[i] - x[i - 1]), 0.0, 1.0)
            more_x.append(np.array([at + np.log1p(-1e-6)]))
            more_y.append(np.array([min(y[i] + slope * (at - x[i]), y[i + 1])]))
        # At the switch: the larger sizes' slope goes back, but never below the smaller size's time.
        if inside and i + 2 < x.size:
            slope = np.clip((y[i + 2] - y[i + 1]) / (x[i + 2] - x[i + 1]), 0.0, 1.0)
            more_x.append(np.array([at]))
            more_y.append(np.array([max(y[i + 1] - slope * (x[i + 1] - at), y[i])]))
    xs, ys = np.concatenate(more_x), np.concatenate(more_y)
    order = np.argsort(xs, kind="stable")
    return np.exp(xs[order]), np.exp(ys[order])


def fit_prefill(device: str, profiles: Sequence[OperatorProfile], tolerance: float = 0.0) -> PrefillFit:
    """Fit the profiles of one die (A800 with A100, H800 with H100).

    Rows with several prompts are left out: latency models sum single chunks."""
    own: dict[str, dict[str, SizeCurve]] = {}
    work: list[float] = []
    slopes: list[float] = []
    lines: dict[str, dict[Heads, list[tuple[float, float, float]]]] = {}
    past = chunk = 0
    for p in profiles:
        one = p.where((p.x["batch"] == 1) & (p.x["chunk"] > 0))
        heads = np.stack([one.x["q_heads"], one.x["kv_heads"]], axis=1)
        for q, kv in np.unique(heads, axis=0):
            rows = one.where((heads == (q, kv)).all(axis=1))
            alone = rows.where(rows.x["past"] == 0)
            if len(alone) > 2:
                own.setdefault(p.source, {})[heads_key((int(q), int(kv)))] = curve(
                    alone.x["chunk"], alone.ms, tolerance, steps=True
                )
                chunk = max(chunk, int(alone.x["chunk"].max()))
            for c in np.unique(rows.x["chunk"][rows.x["past"] > 0]):
                at = rows.where((rows.x["chunk"] == c) & (rows.x["past"] > 0))
                if np.unique(at.x["past"]).size >= 4:
                    a, b = _line(at.x["past"], at.ms)
                    # Only a wide range of prefixes tells the slope from noise.
                    if np.ptp(at.x["past"]) >= 2000:
                        work.append(float(c * q))
                        slopes.append(b)
                    lines.setdefault(p.source, {}).setdefault((int(q), int(kv)), []).append((float(c), a, b))
                    past = max(past, int(at.x["past"].max()))
    over = {
        source: {
            heads_key(heads): fitted for heads, seen in sorted(by_heads.items()) if (fitted := _over(seen)) is not None
        }
        for source, by_heads in sorted(lines.items())
    }
    peak = accelerator(device).flops
    w, s = np.array(work), np.array(slopes)
    good = s > 0
    if good.sum() < 4:
        return PrefillFit(device, own, over, None, peak * _DEFAULT_SLOPE, past, chunk)
    line = _medians(w[good], s[good] * 1e6)
    # 4·HEAD_DIM FLOPs for each row × head and cached token, over ns: FLOP/s; the best point is a full device.
    full = 4e9 * np.array(line.size, dtype=np.float64) * HEAD_DIM / line.values
    return PrefillFit(device, own, over, line, float(f"{full.max():.4g}"), past, chunk)


def _line(past: Column, ms: Column) -> tuple[float, float]:
    """Return intercept and slope (ms, ms a cached token) by least squares of relative residuals."""
    a = np.stack([np.ones_like(past), past], axis=1) / ms[:, None]
    solution, *_ = np.linalg.lstsq(a, np.ones_like(ms), rcond=None)
    return float(solution[0]), float(solution[1])


def _over(seen: list[tuple[float, float, float]]) -> tuple[SizeCurve, SizeCurve] | None:
    """Return curves of intercepts (ms) and slopes (ns) by chunk from (chunk, intercept, slope); None below 4 points."""
    good = sorted((c, a, b) for c, a, b in seen if a > 0 and b > 0)
    if len(good) < 4:
        return None
    chunks, a, b = (np.array(column) for column in zip(*good, strict=True))
    return curve(chunks, a, 0.02), curve(chunks, b * 1e6, 0.02, steps=True, unit=1e-2)


def _medians(work: Column, slope: Column) -> SizeCurve:
    """Fit the median slope by eighths of an octave of work, made monotone: more rows never read the cache faster."""
    bins = np.round(np.log2(work) * 8)
    keys = np.unique(bins)
    at = np.array([np.exp(np.mean(np.log(work[bins == k]))) for k in keys])
    middle = np.maximum.accumulate([np.median(slope[bins == k]) for k in keys])
    return curve(at, np.asarray(middle, dtype=np.float64), 0.005, unit=1e-2)


def batched_rows(profile: OperatorProfile) -> tuple[OperatorProfile, Column]:
    """Return the rows of several prompts whose single prompt was measured too, and its milliseconds alone."""
    x = profile.x
    keys = list(zip(x["q_heads"], x["kv_heads"], x["chunk"], x["past"], strict=True))
    alone = {key: ms for key, batch, ms in zip(keys, x["batch"], profile.ms, strict=True) if batch == 1}
    keep = np.array([b > 1 and key in alone for key, b in zip(keys, x["batch"], strict=True)], dtype=np.bool_)
    return profile.where(keep), np.array([alone[key] for key, kept in zip(keys, keep, strict=True) if kept])


def fit_batched_prefill(profiles: Sequence[OperatorProfile]) -> BatchedPrefill | None:
    """Fit one library's profiles: the median by half octaves of tiles, made monotone (more tiles leave less idle); None
    where no batch was measured."""
    tiles: list[float] = []
    shares: list[float] = []
    for profile in profiles:
        if profile.family != PREFILL:
            continue
        rows, alone = batched_rows(profile)
        tiles.extend(np.round(2 * np.log2(rows.x["chunk"] * rows.x["q_heads"])) / 2)
        shares.extend((rows.ms - alone) / ((rows.x["batch"] - 1) * alone))
    if not tiles:
        return None
    at, found = np.array(tiles), np.array(shares)
    knots = np.unique(at)
    middle = np.maximum.accumulate([max(float(np.median(found[at == knot])), 0.0) for knot in knots])
    return BatchedPrefill(tuple(float(knot) for knot in knots), tuple(round(float(share), 4) for share in middle))


def fit_decode(device: str, profiles: Sequence[OperatorProfile]) -> DecodeFit:
    """Fit grids by source and heads.

    Cells of a grid that were not measured (they did not fit the memory) are extrapolated from the last measured cell of
    their row or column as reads beyond the grid are, so that a look-up needs no case for them."""
    own = accelerator(device)
    large: dict[str, list[float]] = {}
    cached: dict[str, float] = {}
    cells: dict[str, dict[Heads, dict[tuple[int, int], float]]] = {}
    for p in profiles:
        moved = 4.0 * p.x["batch"] * p.x["past"] * p.x["kv_heads"] * p.x["head_dim"]
        # Where a profile reaches far enough, only reads of 4 × LARGE_BYTES count: efficiency still rises below.
        most = moved > (LARGE_BYTES if moved.max() < 4 * LARGE_BYTES else 4 * LARGE_BYTES)
        efficiency = moved / (p.ms * 1e-3) / own.bandwidth
        large.setdefault(p.source, []).extend(efficiency[most])
        if (efficiency > 1.0).any():
            # The cache ends between this read and the next power of two: in the middle, by logarithms.
            cached[p.source] = float(f"{2**0.5 * moved[efficiency > 1.0].max():.3g}")
        for b, past, q, kv, ms in zip(p.x["batch"], p.x["past"], p.x["q_heads"], p.x["kv_heads"], p.ms, strict=True):
            cells.setdefault(p.source, {}).setdefault((int(q), int(kv)), {})[int(b), int(past)] = float(ms)
    tails = {
        s: round(min(float(np.median(r)) if r else _DEFAULT_TAIL, MOST_EFFICIENT), 4) for s, r in sorted(large.items())
    }
    grids: dict[str, dict[str, DecodeGrid]] = {}
    growth: dict[str, BandwidthGrowth] = {}
    for source, by_heads in sorted(cells.items()):
        growth[source] = _growth(by_heads, tails[source] * own.bandwidth)
        for heads, times in sorted(by_heads.items()):
            counts, past_ = sorted({b for b, _ in times}), sorted({p for _, p in times})
            if len(counts) < 2 or len(past_) < 2:
                continue
            table = _filled(counts, past_, times, heads[1] * _HEAD_DIM, own.bandwidth, growth[source])
            rows = tuple(tuple(float(f"{v:.4g}") for v in row) for row in table)
            grids.setdefault(source, {})[heads_key(heads)] = DecodeGrid(tuple(counts), tuple(past_), rows)
    kept = {source: tails[source] for source in grids}
    return DecodeFit(device, _HEAD_DIM, grids, kept, {source: growth[source] for source in grids}, cached)


def _growth(by_heads: Mapping[Heads, Mapping[tuple[int, int], float]], tail: float) -> BandwidthGrowth:
    """Return how bandwidth rises with bytes: the median, by octave of bytes, over neighbouring histories of all rows.

    tail: bytes/s of large reads, reached at `LARGE_BYTES` where no measurement goes so far."""
    rises: dict[int, list[float]] = {}
    speeds: dict[int, list[float]] = {}
    for heads, times in by_heads.items():
        token_bytes = 4.0 * heads[1] * _HEAD_DIM
        for count in {b for b, _ in times}:
            row = sorted((past, ms) for (b, past), ms in times.items() if b == count and past >= _SHORT_PAST)
            for (past, ms), (longer, longer_ms) in pairwise(row):
                at = round(float(np.log2(count * past * token_bytes)))
                octaves = np.log2(longer / past)
                rises.setdefault(at, []).append(float(np.log(longer / past * ms / longer_ms) / octaves))
                speeds.setdefault(at, []).append(count * longer * token_bytes / (longer_ms * 1e-3))
    top = float(np.log2(LARGE_BYTES))
    if not rises:
        return BandwidthGrowth((top,), (0.0,))
    sizes, gain = [float(min(rises))], [0.0]
    for at in sorted(rises):
        sizes.append(at + 1.0)
        gain.append(round(gain[-1] + max(float(np.median(rises[at])), 0.0), 4))
    if sizes[-1] < top:
        gain.append(round(gain[-1] + max(float(np.log(tail / np.median(speeds[max(speeds)]))), 0.0), 4))
        sizes.append(round(top, 4))
    return BandwidthGrowth(tuple(sizes), tuple(gain))


def _filled(
    counts: list[int],
    past: list[int],
    times: Mapping[tuple[int, int], float],
    width: int,
    bandwidth: float,
    growth: BandwidthGrowth,
) -> list[list[float]]:
    table = [[times.get((b, p), np.nan) for p in past] for b in counts]
    for i, b in enumerate(counts):
        for j, p in enumerate(past):
            if not np.isnan(table[i][j]):
                continue
            # From the cell before in the column and in the row, filled or measured: their mean.
            before = [(table[i - 1][j], counts[i - 1] * p)] if i else []
            before += [(table[i][j - 1], b * past[j - 1])] if j else []
            options = []
            for ms, tokens in before:
                if not np.isnan(ms):
                    ends = np.array([float(max(tokens, 1))]), np.array([float(max(b * p, 1))]), np.array([ms])
                    options.append(ms * float(longer_reads(*ends, width, bandwidth, growth)[0]))
            table[i][j] = float(np.mean(options)) if options else np.nan
    # Cells with neither (at the table's start): the nearest measured cell of the row.
    for i in range(len(counts)):
        row = np.array(table[i])
        if np.isnan(row).any() and not np.isnan(row).all():
            good = np.flatnonzero(~np.isnan(row))
            table[i] = [float(row[good[np.argmin(np.abs(good - j))]]) for j in range(row.size)]
    return table


def fit_device(
    device: str,
    profiles: Sequence[OperatorProfile],
    provenance: Sequence[str] = (),
    tolerance: float = 0.01,
    slim: bool = True,
) -> DeviceFit:
    """Fit every family that `profiles` cover for the die of `device`. Raises ConfigError when none is of this die.

    slim: keep only what `compile` uses: one attention library, and collectives over the NVLink switch."""
    die = accelerator(device).kernels
    own = [p for p in profiles if accelerator(p.device).kernels == die and len(p)]
    if not own:
        found = sorted({p.device for p in profiles})
        raise ConfigError(f"no profile of {die} among those read; they are of {', '.join(found) or 'nothing'}")
    by = {family: [p for p in own if p.family == family] for family in (LINEAR, ELEMENTWISE, PREFILL, DECODE)}
    # An A800 shares the A100's die but has slower links: collectives are fitted from the die's own device only.
    collectives = [p for p in own if p.family == COLLECTIVE and p.device == die]
    prefill = fit_prefill(die, by[PREFILL], tolerance / 2) if by[PREFILL] else None
    if prefill is not None and prefill.own:
        library = preferred_source(list(prefill.own))
        batched = fit_batched_prefill([p for p in by[PREFILL] if p.source == library])
        prefill = msgspec.structs.replace(prefill, batched=batched)
    decode = fit_decode(die, by[DECODE]) if by[DECODE] else None
    # Drop what the preferred sources replace, so that shipped files stay small.
    if slim:
        collectives = [p for p in collectives if "pairwise" not in p.source and p.source != "vllm_eager"]
        collectives = [p for p in collectives if p.op in ("all_reduce", "send_recv")]
        if prefill is not None:
            prefill = msgspec.structs.replace(prefill, own=_preferred(prefill.own))
        if decode is not None:
            grids, tails, growth = _preferred(decode.grids), _preferred(decode.tails), _preferred(decode.growth)
            decode = msgspec.structs.replace(decode, grids=grids, tails=tails, growth=growth)
    return DeviceFit(
        device=die,
        provenance=tuple(provenance),
        linear=fit_linear(die, by[LINEAR], tolerance) if by[LINEAR] else None,
        elementwise=fit_elementwise(by[ELEMENTWISE], tolerance) if by[ELEMENTWISE] else None,
        collectives=fit_collectives(collectives, tolerance) if collectives else None,
        prefill=prefill if prefill is not None and prefill.own else None,
        decode=decode if decode is not None and decode.grids else None,
    )


def borrow(fit: DeviceFit, donor: DeviceFit) -> DeviceFit:
    """Return `fit` with what its die's profiles lack taken from another die's fit: elementwise operators, of which what
    exceeds the least time is scaled by bandwidth, and attention over a prefix, scaled by how fast each die's longest
    prompts attend to themselves.

    The least time is a kernel's start, and is kept: scaled to an RTX 4090's bandwidth, the H100's operators on up to 64
    rows take 7.7 times what LLMServingSim measured on that card, with the start kept 2.7 times (vLLM fuses them)."""
    borrowed = []
    if fit.elementwise is None and donor.elementwise is not None:
        slower = accelerator(donor.device).bandwidth / accelerator(fit.device).bandwidth
        curves = {
            op: {width: _scaled(each, slower, min(each.value)) for width, each in by_width.items()}
            for op, by_width in donor.elementwise.curves.items()
        }
        fit = msgspec.structs.replace(fit, elementwise=ElementwiseFit(curves))
        borrowed.append("elementwise")
    own, theirs = fit.prefill, donor.prefill
    if own is not None and theirs is not None and own.slope is None and theirs.slope is not None:
        mine, other = (each.own[preferred_source(list(each.own))] for each in (own, theirs))
        long = np.array([float(own.chunk)])
        slower = float(np.median([mine[key](long)[0] / other[key](long)[0] for key in mine if key in other]))
        own = msgspec.structs.replace(own, slope=_scaled(theirs.slope, slower), best=theirs.best / slower)
        fit = msgspec.structs.replace(fit, prefill=msgspec.structs.replace(own, past=theirs.past))
        borrowed.append("prefill past")
    return msgspec.structs.replace(fit, borrowed=tuple(borrowed))


def _scaled(curve_: SizeCurve, times: float, start: int = 0) -> SizeCurve:
    value = tuple(max(1, start + round((v - start) * times)) for v in curve_.value)
    return msgspec.structs.replace(curve_, value=value)


def _preferred(sources: dict[str, _T]) -> dict[str, _T]:
    if not sources:
        return sources
    best = preferred_source(list(sources))
    return {best: sources[best]}


def encode(fit: DeviceFit) -> bytes:
    """Return the fit's file content; equal fits give equal bytes."""
    return msgspec.json.encode(fit) + b"\n"
