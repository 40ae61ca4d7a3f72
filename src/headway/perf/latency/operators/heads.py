"""Interpolation over head counts: the measured ones that stand in for an unmeasured one, and their weights."""

from __future__ import annotations

import math
from collections.abc import Iterable

Heads = tuple[int, int]
"""(query heads, KV heads) of one rank."""


def parse(key: str) -> Heads:
    """Return the heads of a key such as "32/8"."""
    q, kv = key.split("/")
    return int(q), int(kv)


def name(heads: Heads) -> str:
    """Return the key of head counts, such as "32/8"."""
    return f"{heads[0]}/{heads[1]}"


def neighbours(wanted: Heads, measured: Iterable[str], most: int = 3) -> list[tuple[str, float]]:
    """Return up to `most` nearest measured head counts with weights that sum to 1; an exact match has weight 1.

    Weights are inverse squared distances, in octaves of query heads and (counting double) of the group size, the query
    heads per KV head."""
    found: list[tuple[float, str]] = []
    for key in measured:
        q, kv = parse(key)
        here = math.log2(wanted[0] / q)
        group = math.log2((wanted[0] / wanted[1]) / (q / kv))
        # Multi-head attention runs other kernels than grouped-query attention: three octaves apart.
        split = (wanted[0] == wanted[1]) != (q == kv)
        distance = here * here + 2 * group * group + (9.0 if split else 0.0)
        if distance == 0:
            return [(key, 1.0)]
        found.append((distance, key))
    found.sort()
    near = found[:most]
    total = sum(1 / d for d, _ in near)
    return [(key, 1 / d / total) for d, key in near]
