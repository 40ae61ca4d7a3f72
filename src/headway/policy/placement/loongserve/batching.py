"""Batches of prompts and their numbers of instances, by LoongServe's dynamic programming (§5.3).

Prompts are ordered by length, longest first, instances by the KV on them; a batch is consecutive prompts on
consecutive instances. f[i][k] is the least sum, over the first i prompts on the first k instances, of a prompt's
batch's time over
its own length: f[i][k] = min over j < i, l <= k of f[j][k - l] + T(j..i, l) · Σ 1/length, or f[i][k - 1]: instances may
stay unused. All splits are tried (as vectors); the published code leaves some out by monotonicity.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

Seconds = Callable[[int, int, int], float]
"""Seconds of one prompt: (tokens, instances, nodes)."""


class PrefillBatch(NamedTuple):
    """Prompts [first, last) on instances [start, stop), both by position in their order."""

    first: int
    last: int
    start: int
    stop: int


def partition(
    tokens: Sequence[int],
    room: Sequence[float],
    nodes: Sequence[int],
    seconds: Seconds,
    most: int = 0,
    max_sp: int = 0,
) -> list[PrefillBatch] | None:
    """Return the best split of prompts, longest first, over instances in order; None if KV fits in no split.

    tokens: of each prompt. room: free KV tokens of each instance; nodes: the node of each. seconds: time of a
    prompt alone; a batch takes their sum, but the time of a single token counts once. most: prompts in a batch; max_sp:
    instances of a batch (0: no limit).
    """
    n, count = len(tokens), len(room)
    if not n or not count:
        return [] if not n else None
    widest = min(max_sp or count, count)
    # predictions depend on an interval's (instances, nodes) only: far fewer shapes than intervals
    shapes = sorted(
        {_shape(nodes, stop - wide, stop) for wide in range(1, widest + 1) for stop in range(wide, count + 1)}
    )
    shape_row = {shape: at for at, shape in enumerate(shapes)}
    alone = np.array([[seconds(t, *shape) for t in tokens] for shape in shapes])
    fixed = np.array([seconds(1, *shape) for shape in shapes])
    # prefix sums, so that any batch [j, i) costs one subtraction
    sums = np.concatenate([np.zeros((len(shapes), 1)), np.cumsum(alone, axis=1)], axis=1)
    inverse = np.concatenate([[0.0], np.cumsum(1.0 / np.asarray(tokens, dtype=np.float64))])
    # the same for tokens and for free KV
    held = np.concatenate([[0.0], np.cumsum(np.asarray(tokens, dtype=np.float64))])
    left = np.concatenate([[0.0], np.cumsum(np.asarray(room, dtype=np.float64))])
    # best[i, k]: least cost of the first i prompts on the first k instances
    best = np.full((n + 1, count + 1), np.inf)
    best[0, :] = 0.0
    chosen: dict[tuple[int, int], PrefillBatch] = {}
    for k in range(1, count + 1):
        wide = np.arange(1, min(widest, k) + 1)
        rows = np.array([shape_row[_shape(nodes, k - int(w), k)] for w in wide])
        space = left[k] - left[k - wide]
        # instance k - 1 may stay unused
        best[1:, k] = best[1:, k - 1]
        chosen.update({(i, k): chosen[i, k - 1] for i in range(1, n + 1) if (i, k - 1) in chosen})
        for i in range(1, n + 1):
            low = max(0, i - most) if most else 0
            j = np.arange(low, i)
            # rows: the prompts of the batch begin at j; columns: it has so many instances
            # a batch takes the sum of its prompts alone, with the time of a single token counted once
            times = sums[rows, i][None, :] - sums[rows][:, j].T - (i - j - 1)[:, None] * fixed[rows][None, :]
            costs = times * (inverse[i] - inverse[j])[:, None] + best[j][:, k - wide]
            # KV of the batch must fit its instances
            costs[(held[i] - held[j])[:, None] > space[None, :]] = np.inf
            at = int(np.argmin(costs))
            value = costs.flat[at]
            if value < best[i, k]:
                best[i, k] = value
                chosen[i, k] = PrefillBatch(int(j[at // len(wide)]), i, k - int(wide[at % len(wide)]), k)
    return _walk_back(chosen, n, count)


def _walk_back(chosen: Mapping[tuple[int, int], PrefillBatch], i: int, k: int) -> list[PrefillBatch] | None:
    """Return the batches of the best split of the first `i` prompts on the first `k` instances; None: there is none."""
    found: list[PrefillBatch] = []
    while i:
        if (i, k) not in chosen:
            return None
        found.append(chosen[i, k])
        i, k = found[-1].first, found[-1].start
    return found[::-1]


def _shape(nodes: Sequence[int], start: int, stop: int) -> tuple[int, int]:
    return stop - start, len(set(nodes[start:stop]))
