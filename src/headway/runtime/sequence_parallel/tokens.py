"""Placement of a chunk's tokens on the members of a ring. Pure data.

With a causal mask later tokens cost more, so that equal consecutive shares are unequal work. Zigzag (2N shards, member
i takes the i-th and the i-th last; Tetris §2.2) and striped placement (every N-th token; Brandon et al. 2023) are even.
Tokens that are decoded one by one all go to the first member, LoongServe's master (§4.2).
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

Positions = npt.NDArray[np.int64]
"""Global token positions of a request."""

Order = Literal["zigzag", "striped", "contiguous", "first"]
ORDERS: tuple[Order, ...] = ("zigzag", "striped", "contiguous")
"""Those that are even: of any chunk. `first` is for chunks in place."""


def spread(start: int, tokens: int, members: int, order: Order) -> tuple[Positions, ...]:
    """The positions in [start, start + tokens) of each member, ascending. Members get none where tokens run out.

    Shares differ by one token at most, in zigzag by two.
    """
    end = start + tokens
    if order == "striped":
        return tuple(np.arange(start + member, end, members, dtype=np.int64) for member in range(members))
    if order == "contiguous":
        return tuple(start + _share(tokens, members, member) for member in range(members))
    if order == "first":
        return tuple(np.arange(start, end if member == 0 else start, dtype=np.int64) for member in range(members))
    # Member i takes shards i and 2N - 1 - i: an early, cheap one and a late, costly one.
    shards = 2 * members
    return tuple(
        start + np.concatenate([_share(tokens, shards, i), _share(tokens, shards, shards - 1 - i)])
        for i in range(members)
    )


def share(size: int, parts: int, part: int) -> tuple[int, int]:
    """Return begin and end of part `part` of `size` items, cut evenly and in order into `parts`."""
    return part * size // parts, (part + 1) * size // parts


def _share(tokens: int, parts: int, part: int) -> Positions:
    return np.arange(*share(tokens, parts, part), dtype=np.int64)
