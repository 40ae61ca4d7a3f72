"""What every profile reader yields: measurements of one operator family, as columns.

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
    """Measurements of one operator: `x[column][i]` took `ms[i]`. A point appears once: repeats are merged (median).

    device: accelerator name. source: who measured (kernel library and version), since libraries differ more than
    shapes do. group: model and tensor-parallel degree, or whatever else names the file's subject.
    """

    family: str
    op: str
    device: str
    source: str
    group: str
    x: Mapping[str, Column]
    ms: Column

    def __len__(self) -> int:
        return int(self.ms.size)

    def where(self, keep: npt.NDArray[np.bool_]) -> OperatorProfile:
        """The rows of which `keep` is true."""
        x = {name: column[keep] for name, column in self.x.items()}
        return OperatorProfile(self.family, self.op, self.device, self.source, self.group, x, self.ms[keep])


def merged(
    family: str, op: str, device: str, source: str, group: str, x: Mapping[str, Column], ms: Column
) -> OperatorProfile:
    """A profile whose repeated points became one, with the median time; rows that are not positive and finite go."""
    good = np.isfinite(ms) & (ms > 0)
    names = list(x)
    keys = np.stack([x[name][good] for name in names], axis=1)
    unique, inverse = np.unique(keys, axis=0, return_inverse=True)
    order = np.lexsort((ms[good], inverse))
    bounds = np.searchsorted(inverse[order], np.arange(unique.shape[0] + 1))
    values = ms[good][order]
    low, high = bounds[:-1], bounds[1:]
    middle = (values[low + (high - low - 1) // 2] + values[low + (high - low) // 2]) / 2 if len(unique) else values
    columns = {name: unique[:, i] for i, name in enumerate(names)}
    return OperatorProfile(family, op, device, source, group, columns, np.asarray(middle, dtype=np.float64))
