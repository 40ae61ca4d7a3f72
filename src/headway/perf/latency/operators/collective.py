"""All-reduce, send and other collectives: cost by bytes, for each number of workers, inside a node or across nodes.

Times between two measured sizes are interpolated in logarithms. Two corrections apply where few sizes were measured.
A larger message is never faster, so a size that took longer than a larger one was disturbed. Time that grows faster
than bytes means that another algorithm takes over: both sides are extrapolated up to the switch (vLLM's own all-reduce
serves messages below 8 MiB by default, NCCL larger ones; elsewhere the switch is assumed at the larger size).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from headway.core.errors import ConfigError
from headway.perf.hardware.links import NetworkLink
from headway.perf.latency.operators.curves import SizeCurve, curve
from headway.perf.latency.operators.profiles import Column, OperatorProfile

PREFERENCE = ("vllm_graph", "nccl", "vidur", "vllm_eager")
"""Sources in order of preference: the collectives that a serving engine runs under CUDA graphs come first.
`vidur`: its all-to-all NVLink nodes (`dgx`), without launch overhead."""

# Bytes up to which vLLM's own all-reduce is used.
_SWITCH = 8 << 20
# A time this many times above a larger message's is taken to be disturbed, not noise.
_DISTURBED = 1.1


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

    def source(self, op: str, workers: int, wanted: str | None = None) -> str | None:
        """Return the source inside a node whose name begins with `wanted` (None: the preferred one), or None."""
        by_name = self.curves.get(op, {})
        fitting = [name for name in sorted(by_name, key=_rank) if str(workers) in by_name[name]]
        return next((name for name in fitting if wanted is None or name.startswith(wanted)), None)

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


def fit_collectives(profiles: Sequence[OperatorProfile], tolerance: float = 0.0) -> CollectiveFit:
    """Fit curves through the medians of up to 48 size classes, so that single outliers of dense grids have no weight.

    tolerance: relative error that thinning the knots may cause."""
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
