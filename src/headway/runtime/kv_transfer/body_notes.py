"""The note of a pushed message: the layer, heads and tokens of its body, with tokens in a compact form."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from headway.kv.slot_ranges import Indices

END, HERE = -1, -2
MOST = 2048
"""Progressions in one note: it stays below 64 KB."""

Progression = tuple[int, int, int]
"""(first, count, step)."""


class BodyNote(msgspec.Struct, frozen=True, array_like=True):
    """Keys and values of one layer: (2, heads, tokens, vector), tokens as progressions. Without a body: `END` for the
    layer is the end of a piece, `heads` being (messages that it had, 0); `HERE` is the receiver's answer to that."""

    piece: int
    layer: int
    heads: tuple[int, int]
    tokens: tuple[Progression, ...] = ()


_decoder = msgspec.msgpack.Decoder(BodyNote)
encode = msgspec.msgpack.Encoder().encode


def decode(note: bytes) -> BodyNote:
    """Raises msgspec.DecodeError."""
    return _decoder.decode(note)


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
