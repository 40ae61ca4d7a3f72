"""What connectors tell each other beside KV, and the tokens of a body in a compact form."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from headway.kv.slot_ranges import Indices

MOST = 2048
"""Progressions in one note."""

Progression = tuple[int, int, int]
"""(first, count, step)."""


class KvBody(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Keys and values of one layer: (2, heads, tokens, vector), tokens as progressions; `size` bytes. They lie in a
    slab of the sender's memory (`SlabMemory.number`), which is given back by `SlabFree`, or follow."""

    piece: int
    layer: int
    heads: tuple[int, int]
    tokens: tuple[Progression, ...]
    size: int = 0
    memory: int = 0
    slab: int = 0


class SliceEnd(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """All of a piece has been sent, in so many bodies. Answered by `SliceKept`."""

    piece: int
    bodies: int


class SliceKept(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """All of a piece is in its slots."""

    piece: int


class MemoryOffer(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Memory of the sender; `about`: how one of its `kind` is found. Answered by `MemoryAnswer`."""

    memory: int
    kind: str
    about: bytes


class MemoryAnswer(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Whether the receiver can read offered memory."""

    memory: int
    taken: bool


class SlabFree(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """A slab has been read."""

    memory: int
    slab: int


Note = KvBody | SliceEnd | SliceKept | MemoryOffer | MemoryAnswer | SlabFree

decode = msgspec.msgpack.Decoder(Note).decode
encode = msgspec.msgpack.Encoder().encode


def shorten(numbers: Indices) -> list[Progression]:
    """Numbers as arithmetic progressions, in order: contiguous and striped tokens are a few."""
    found: list[Progression] = []
    steps = np.diff(numbers)
    edges = [*(np.flatnonzero(steps[1:] != steps[:-1]) + 1).tolist(), len(steps)] if len(steps) else []
    at = 0
    for edge in edges:  # the step is the same from the number at `at` to the one at `edge`
        if edge > at:
            found.append((int(numbers[at]), edge - at + 1, int(numbers[edge] - numbers[edge - 1])))
            at = edge + 1
    if at < len(numbers):
        found.append((int(numbers[at]), 1, 1))
    return found


def lengthen(progressions: Sequence[Progression]) -> Indices:
    """The numbers again."""
    parts = [first + step * np.arange(count, dtype=np.int64) for first, count, step in progressions]
    return parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def packets(numbers: Indices, most: int) -> Iterator[tuple[slice, tuple[Progression, ...]]]:
    """Cut numbers into packets of at most `most`, each with its progressions, at most `MOST`."""
    for start in range(0, len(numbers), most):
        short = shorten(numbers[start : start + most])
        at = start
        for first in range(0, len(short), MOST):
            some = tuple(short[first : first + MOST])
            size = sum(count for _, count, _ in some)
            yield slice(at, at + size), some
            at += size
