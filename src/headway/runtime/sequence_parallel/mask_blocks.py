"""A causal mask over arbitrary rows and keys, cut into the two shapes that the attention primitive has.

Row i sees the first v(i) keys, and v never falls: a staircase. Where it is flat, rows see one rectangle; where it rises
by one a row, a rectangle and a causal square. Zigzag, striped, contiguous and history then need no code of their own:
in zigzag each step of a ring comes out as one rectangle, in striped as one causal square, with a row and a key dropped
where the keys come from a later member.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from headway.runtime.sequence_parallel.tokens import Positions


class MaskBlock(NamedTuple):
    """Rows [row, row_end) attend to keys [key, key_end). Causal blocks are square: the i-th row sees keys 0..i."""

    row: int
    row_end: int
    key: int
    key_end: int
    causal: bool


def mask_blocks(queries: Positions, keys: Positions, past: int = 0) -> tuple[MaskBlock, ...]:
    """Blocks that hold each pair (row, key) with keys[key] <= queries[row] exactly once, and nothing else.

    queries, keys: ascending. `past` keys that every row sees come before the others; keys are numbered past included.
    No block is empty.
    """
    # seen[i]: the number of keys that row i sees, that is v(i) of the module's docstring.
    seen = past + np.searchsorted(keys, queries, side="right")
    rows = len(queries)
    first = int(np.searchsorted(seen, 1))  # rows before it see nothing
    rise = np.diff(seen)
    turns = np.append(np.flatnonzero(np.diff(rise)) + 1, max(rows - 1, 0))  # rows from which the rise is another
    blocks: list[MaskBlock] = []
    row = first
    while row < rows:
        last = row
        # A rise by 0 or 1 goes on for several rows; a larger one makes the row a rectangle of its own.
        if row < rows - 1 and rise[row] <= 1:
            last = int(turns[np.searchsorted(turns, row, side="right")])
        height, visible = last + 1 - row, int(seen[row])
        if height > 1 and rise[row] == 1:
            if visible > 1:
                # All rows see the keys before the staircase; the square begins with the last key that the first row
                # sees.
                blocks.append(MaskBlock(row, last + 1, 0, visible - 1, False))
            blocks.append(MaskBlock(row, last + 1, visible - 1, visible - 1 + height, True))
        else:
            blocks.append(MaskBlock(row, last + 1, 0, visible, False))
        row = last + 1
    return tuple(blocks)
