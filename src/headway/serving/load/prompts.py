"""Prompts of random token ids, as JSON text.

Ids are drawn once into a pool that is kept as JSON text; a prompt is a slice of it from a random place. A prompt of a
million ids costs one copy of five megabytes, so building prompts does not delay the client. Two prompts share a prefix
only if they happen to start at the same place of the pool.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

POOL_TOKENS = 1 << 20
"""Places in the pool at which a prompt may start."""
SAFE_VOCAB = 256
"""Vocabulary size for a model whose own is unknown: ids below 256 exist in all common models."""


class PromptPool:
    """Pool of random ids in 3 … vocab_size - 1 (0 … 2 are often padding, start and end).

    longest: tokens of the longest prompt.
    """

    def __init__(self, rng: np.random.Generator, vocab_size: int = SAFE_VOCAB, longest: int = 0) -> None:
        if vocab_size < 2:
            raise ValueError(f"a vocabulary of {vocab_size} ids leaves nothing to draw from")
        self._rng = rng
        self.vocab_size = vocab_size
        # A tiny test vocabulary keeps all its ids.
        first = 3 if vocab_size > 8 else 0
        self._size = max(longest, 1) + POOL_TOKENS
        ids = rng.integers(first, vocab_size, self._size)
        self._text = ",".join(map(str, ids.tolist())).encode()
        # Byte offset of each id; the last entry is one past an imaginary final comma, as `ids` subtracts it.
        commas = np.flatnonzero(np.frombuffer(self._text, np.uint8) == ord(",")) + 1
        self._starts = np.concatenate(([0], commas, [len(self._text) + 1]))

    def place(self) -> int:
        """Draw a random place; prompts from the same place share a prefix."""
        return int(self._rng.integers(0, POOL_TOKENS))

    def json(self, tokens: int, place: int | None = None) -> bytes:
        """Return a JSON array of `tokens` ids from `place` (None: a random one)."""
        return b"[" + self.ids(tokens, self.place() if place is None else place) + b"]"

    def json_sharing(self, tokens: int, shared: int, place: int) -> bytes:
        """Return a JSON array whose first `shared` ids are those from `place`; the rest is from a random place."""
        shared = min(shared, tokens)
        parts = [self.ids(shared, place), self.ids(tokens - shared, self.place())]
        return b"[" + b",".join(part for part in parts if part) + b"]"

    def ids(self, tokens: int, place: int) -> bytes:
        """Return `tokens` ids from `place`, separated by commas."""
        if place + tokens > self._size:
            raise ValueError(
                f"a prompt of {tokens} tokens is longer than this pool was made for ({self._size - POOL_TOKENS})"
            )
        if tokens <= 0:
            return b""
        # The byte before the next start is the comma that ends the slice.
        return self._text[int(self._starts[place]) : int(self._starts[place + tokens]) - 1]


def vocab_size_of(model: str | None) -> int | None:
    """Return the vocabulary size in a checkpoint folder's config.json; None when `model` is not such a folder."""
    if model is None:
        return None
    try:
        config = json.loads((Path(model) / "config.json").read_text())
        size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    except (OSError, ValueError, AttributeError):
        return None
    return int(size) if size else None
