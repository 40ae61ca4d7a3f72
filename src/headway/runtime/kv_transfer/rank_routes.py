"""An instance that is several processes has an end for each rank; what goes from which rank of one to which of another.

Re-sharding: each rank of the target gets its own KV heads from ranks of the source that have them, directly. Where the
source has a head several times (fewer KV heads than ranks), its copies take turns; where the target has it several
times, each copy is sent. No torch.
"""

from __future__ import annotations

from functools import cache

_APART = 1 << 16
"""Difference between the numbers of two ends of an instance; instances have smaller numbers, and rank 0's end has the
instance's own."""


def end_of(instance: int, rank: int) -> int:
    """Return the number that identifies a rank of an instance among its peers."""
    return instance + rank * _APART


def instance_of(end: int) -> int:
    """Return the instance of an end."""
    return end % _APART


def rank_of(end: int) -> int:
    """Return the rank of an end."""
    return end // _APART


def named(end: int) -> str:
    """An end in words."""
    return f"instance {instance_of(end)}" + (f" (worker {rank_of(end)})" if rank_of(end) else "")


def heads_of(kv_heads: int, ranks: int, rank: int) -> range:
    """The KV heads that a tensor-parallel rank has (`runtime.model.shard`)."""
    return range(rank * kv_heads // ranks, ((rank + 1) * kv_heads - 1) // ranks + 1)


@cache
def routes(kv_heads: int, sources: int, targets: int) -> dict[tuple[int, int], range]:
    """Map (source rank, target rank) to the KV heads sent, for instances of so many tensor-parallel ranks.

    Each target rank gets each of its heads once; pairs of ranks that are missing exchange nothing.
    """
    found: dict[tuple[int, int], range] = {}
    for target in range(targets):
        for head in heads_of(kv_heads, targets, target):
            holders = [rank for rank in range(sources) if head in heads_of(kv_heads, sources, rank)]
            # Copies of a head take turns, so that no source rank sends to all targets.
            way = (holders[target % len(holders)], target)
            found[way] = range(found[way].start if way in found else head, head + 1)
    return found
