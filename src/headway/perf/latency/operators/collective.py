"""All-reduce, send and other collectives: cost by bytes, for each number of workers, inside a node or across nodes.

Times between two measured sizes are interpolated in logarithms.
"""

from __future__ import annotations

import msgspec
import numpy as np

from headway.core.errors import ConfigError
from headway.perf.hardware.links import NetworkLink
from headway.perf.latency.operators.curves import Column, SizeCurve

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
