"""Profiles of single operators, as all readers return them: measurements of one operator family, in columns.

Times are milliseconds here and in the fits, because every known profile format states milliseconds; `compile` is the
only place that turns them into seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[np.float64]

LINEAR = "linear"
"""Matrix products. Columns m (rows), k, n."""
ELEMENTWISE = "elementwise"
"""Norms, rotary embedding, activation, additions, embedding look-up. Columns tokens, width (elements a row)."""
PREFILL = "prefill"
"""Attention of prompts. Columns batch, chunk, past, q_heads, kv_heads, head_dim: of one rank, `past` cached."""
DECODE = "decode"
"""Attention of single tokens. Columns batch, past (of each request), q_heads, kv_heads, head_dim: of one rank."""
COLLECTIVE = "collective"
"""Columns workers, across (1 when nodes are crossed), bytes."""

FAMILIES = (LINEAR, ELEMENTWISE, PREFILL, DECODE, COLLECTIVE)


@dataclass(frozen=True)
class OperatorProfile:
    """Measurements of one operator. Points are unique: repeats are merged (median)."""

    family: str
    """One of `FAMILIES`."""
    op: str
    device: str
    """Accelerator name."""
    source: str
    """Kernel library and version, or the profiler: libraries differ more than shapes do."""
    group: str
    """Model and tensor-parallel degree, or another name of the file's subject."""
    x: Mapping[str, Column]
    """Columns of the family: point i is `x[column][i]`."""
    ms: Column
    """Milliseconds of each point."""

    def __len__(self) -> int:
        return int(self.ms.size)

    def where(self, keep: npt.NDArray[np.bool_]) -> OperatorProfile:
        """Return the points where `keep` is true."""
        x = {name: column[keep] for name, column in self.x.items()}
        return OperatorProfile(self.family, self.op, self.device, self.source, self.group, x, self.ms[keep])


def merged(
    family: str, op: str, device: str, source: str, group: str, x: Mapping[str, Column], ms: Column
) -> OperatorProfile:
    """Return a profile with repeated points merged (median); rows whose time is not positive and finite are dropped."""
    good = np.isfinite(ms) & (ms > 0)
    names = list(x)
    keys = np.stack([x[name][good] for name in names], axis=1)
    unique, inverse = np.unique(keys, axis=0, return_inverse=True)
    # Sorted by point, then time: each point's times are the slice bounds[i]:bounds[i + 1], its median their middle.
    order = np.lexsort((ms[good], inverse))
    bounds = np.searchsorted(inverse[order], np.arange(unique.shape[0] + 1))
    values = ms[good][order]
    low, high = bounds[:-1], bounds[1:]
    middle = (values[low + (high - low - 1) // 2] + values[low + (high - low) // 2]) / 2 if len(unique) else values
    columns = {name: unique[:, i] for i, name in enumerate(names)}
    return OperatorProfile(family, op, device, source, group, columns, np.asarray(middle, dtype=np.float64))
