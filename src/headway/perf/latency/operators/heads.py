"""Attention measured for some head counts, asked for any: which measured ones stand in, and with what weight."""

from __future__ import annotations

import math
from collections.abc import Iterable

Heads = tuple[int, int]
"""(query heads, KV heads) of one rank."""


def parse(key: str) -> Heads:
    q, kv = key.split("/")
    return int(q), int(kv)


def name(heads: Heads) -> str:
    return f"{heads[0]}/{heads[1]}"


def neighbours(wanted: Heads, measured: Iterable[str], most: int = 3) -> list[tuple[str, float]]:
    """The nearest measured head counts and their weights (sum 1): distance in octaves of query heads and of the group
    size (query heads a KV head), inverse squares, the
    group counting more. An exact match stands alone."""
    found: list[tuple[float, str]] = []
    for key in measured:
        q, kv = parse(key)
        here = math.log2(wanted[0] / q)
        group = math.log2((wanted[0] / wanted[1]) / (q / kv))
        split = (wanted[0] == wanted[1]) != (q == kv)  # kernels that pack the group are others than those that cannot
        distance = here * here + 2 * group * group + (9.0 if split else 0.0)
        if distance == 0:
            return [(key, 1.0)]
        found.append((distance, key))
    found.sort()
    near = found[:most]
    total = sum(1 / d for d, _ in near)
    return [(key, 1 / d / total) for d, key in near]
