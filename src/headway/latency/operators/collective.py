"""All-reduce, send and the other collectives: cost by bytes, for each number of workers, inside a node or across."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from headway.core.errors import ConfigError
from headway.latency.operators.curves import Curve, curve
from headway.latency.operators.profiles import Column, Profile

PREFERENCE = ("vllm_graph", "nccl", "vidur", "vllm_eager")
"""Which library's measurement is used where several exist: what a serving engine runs under CUDA graphs comes first.
`vidur` stands for its all-to-all NVLink nodes (`dgx`), without launch overhead."""


class CollectiveFit(msgspec.Struct, frozen=True):
    """`curves[op][source][workers(+across)]`: ms by bytes."""

    curves: dict[str, dict[str, dict[str, Curve]]]

    def curve(self, op: str, workers: int, across: bool = False, source: str | None = None) -> Curve | None:
        """The preferred source's curve, None when nothing measured it."""
        key = f"{workers}{'+' if across else ''}"
        sources = self.curves.get(op, {})
        for name in (source,) if source else sorted(sources, key=_rank):
            if name in sources and key in sources[name]:
                return sources[name][key]
        return None

    def ms(self, op: str, count: Column, workers: int, across: bool = False) -> Column:
        """Milliseconds for `count` bytes. An unmeasured number of workers takes the nearest measured one, scaled as a
        ring grows: (w-1)/w of the bytes cross each link."""
        found = self.curve(op, workers, across)
        if found is not None:
            return found(count)
        known = [w for w in range(2, 129) if self.curve(op, w, across) is not None]
        if not known:
            raise ConfigError(f"no measurement of {op} {'across nodes' if across else 'inside a node'}")
        near = min(known, key=lambda w: abs(np.log(w / workers)))
        other = self.curve(op, near, across)
        assert other is not None
        return np.asarray(other(count) * ((workers - 1) / workers) / ((near - 1) / near), dtype=np.float64)


def _rank(source: str) -> tuple[int, str]:
    first = next((i for i, name in enumerate(PREFERENCE) if source.startswith(name)), len(PREFERENCE))
    return first + (10 if "pairwise" in source else 0), source


def fit_collectives(profiles: Sequence[Profile], tolerance: float = 0.0) -> CollectiveFit:
    """Curves through the medians of up to 48 size classes, so that single outliers of dense grids carry no weight."""
    curves: dict[str, dict[str, dict[str, Curve]]] = {}
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
        return size[order], ms[order]
    edges = np.unique(np.quantile(np.log(size), np.linspace(0, 1, most // 2 + 1)))
    edges = np.unique(np.concatenate([edges, np.linspace(np.log(size.min()), np.log(size.max()), most // 2 + 1)]))
    which = np.clip(np.searchsorted(edges, np.log(size), side="right") - 1, 0, edges.size - 2)
    classes = np.unique(which)
    middle = np.array([np.exp(np.mean(np.log(size[which == c]))) for c in classes])
    return middle, np.array([np.median(ms[which == c]) for c in classes])
