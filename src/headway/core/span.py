"""Ranges of a request's tokens and the instances that compute them.

Medha, Tetris and PecSched share this type (docs/architecture.md).

A request is a list of spans; a span is a range of its tokens, placed on a group of instances, with a parallel strategy.
On a single instance a whole request is one span.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from headway.core.request import Request

AttentionStrategy = Literal["local", "ring", "striped", "contiguous", "ulysses", "megatron"]
"""`ring` gives each instance two ranges of tokens, one from each end (zigzag), `striped` every n-th token: either way
all have the same causal attention to compute. `contiguous` gives each one range (the first rings): all wait for the
last instance, which has nearly twice the mean."""
MlpStrategy = Literal["local", "ulysses", "megatron"]


Phase = Literal["all", "prefill", "decode"]
"""Part of a request that a scheduler computes: all; its prefill only, whose KV is then staged; its decode only, with
KV that has been transferred."""


def cut(start: int, end: int, members: int, rows: int) -> tuple[tuple[int, int], ...]:
    """Tokens [start, end) as pieces that a group of so many members computes one after the other, each through all
    layers: at most `rows` rows of a member at once (two at least), as equal as can be. 0 rows: all at once.

    All pieces but the last are multiples of twice the members: each member then gets as many tokens of a piece as any
    other in every placement order (zigzag has two runs of each), and KV of earlier pieces has no cause to move."""
    unit = 2 * members
    most = max(unit, rows * members // unit * unit) if rows else end - start
    if end - start <= most:
        return ((start, end),)
    # Fewest pieces of at most `most` tokens, then equal sizes rounded up to whole units.
    count = -(-(end - start) // most)
    size = -(-(end - start) // (count * unit)) * unit
    return tuple((at, min(at + size, end)) for at in range(start, end, size))


class Strategy(msgspec.Struct, frozen=True):
    """How a span's layers are spread over its group."""

    attn: AttentionStrategy = "local"
    mlp: MlpStrategy = "local"


class SpanTask(msgspec.Struct, frozen=True):
    """Tokens [start, end) of a request as live instances compute them: what `runtime.sequence_parallel.ChunkSpec`
    needs. Every instance of the group, and any that joins later, derives from it where the KV lies."""

    start: int
    end: int
    group: tuple[int, ...]
    """Instances, in order."""
    strategy: Strategy = Strategy()
    node: int | None = None
    """How many of the group make a node; None: all."""
    in_place: bool = False
    """KV of earlier tasks stays where it lies, unless its heads are cut otherwise than this task's; its own goes to the
    first of the group (of Ulysses: of the node). The whole group decodes so, one token a task."""
    rows: int = 0
    """The group computes it piece by piece, with at most so many rows of an instance at once (`cut`); 0: at once."""
    keepers: tuple[int, ...] = ()
    """Of a task that is in place, those of the group that keep KV: what others hold is brought to them. (): all do."""


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens [start, end) of a request on the instances of `group`."""

    request: Request
    start: int
    end: int
    group: tuple[int, ...] = (0,)
    """Instances, in order."""
    strategy: Strategy = Strategy()

    @classmethod
    def whole(cls, request: Request, instance: int = 0) -> Span:
        """The span of a request that lives on one instance: all of its prompt that is not cached."""
        return cls(request=request, start=request.cached_tokens, end=request.prompt_tokens, group=(instance,))
