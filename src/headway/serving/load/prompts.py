"""Random prompts for load runs, and the machine and versions that a measurement ran on.

Ids are drawn once into a pool that is kept as JSON text; a prompt is a slice of it from a random place. A prompt of a
million ids costs one copy of five megabytes, so building prompts does not delay the client. Two prompts share a prefix
only if they happen to start at the same place of the pool.
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from zlib import crc32

import numpy as np

from headway.core.errors import CheckpointError
from headway.core.files import JsonFields, read_json
from headway.core.machine import CORES
from headway.perf.device import processor_name
from headway.sim.workload import TraceRequest

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

    def json(self, tokens: int) -> bytes:
        """Return a JSON array of `tokens` ids from a random place."""
        return b"[" + self.ids(tokens, self.place()) + b"]"

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
        config = read_json(Path(model) / "config.json")
        inner = config.get("text_config")
        fields = inner if "vocab_size" not in config and isinstance(inner, dict) else config
        return JsonFields(fields, model).whole("vocab_size")
    except CheckpointError:
        return None


class TextPrompts:
    """Prompts of a trace's requests: each piece of their texts (`PromptText`) has ids of its own.

    Where a prompt repeats an answer, it has the answer's ids if they are known, else other random ones."""

    def __init__(self, pool: PromptPool) -> None:
        self._pool = pool
        # Ids of answers by namespace and piece.
        self._answers: dict[tuple[int, int], list[int]] = {}

    def prompt(self, request: TraceRequest) -> bytes:
        """Return a request's prompt as a JSON array of ids."""
        parts, at = [], 0
        text = request.text.cut(request.prompt_tokens) if request.text is not None else None
        for end, number in text.pieces if text is not None else ():
            assert text is not None
            piece = (text.namespace, number)
            known = self._answers.get(piece, [])[: end - at]
            # By the piece alone: the order in which turns come depends on the server.
            place = crc32(repr(piece).encode()) % POOL_TOKENS
            parts += [",".join(map(str, known)).encode(), self._pool.ids(end - at - len(known), place)]
            at = end
        parts.append(self._pool.ids(request.prompt_tokens - at, self._pool.place()))
        return b"[" + b",".join(part for part in parts if part) + b"]"

    def answered(self, request: TraceRequest, ids: list[int]) -> None:
        """Note the answer to a request, which later prompts may repeat."""
        text = request.text
        # Text behind the prompt is the answer.
        if text is not None and text.tokens > request.prompt_tokens:
            self._answers[text.namespace, text.pieces[-1].id] = ids


# Host and software versions of a measurement, for its JSON. Nothing identifies a user or a path.


def machine() -> dict[str, object]:
    """Return processor, usable cores and memory of the client's host; a remote server's are not known."""
    return {
        "cpu": processor_name(),
        "cores": len(CORES),
        "memory_gib": _memory_gib(),
        "system": platform.system(),
    }


def versions() -> dict[str, str]:
    """Return the versions of Python, Headway, torch and aiohttp, from metadata, without importing them."""
    found = {"python": platform.python_version()}
    for name in ("headway", "torch", "aiohttp"):
        try:
            found[name] = metadata.version(name)
        # torch and aiohttp are in the extra `serve`.
        except metadata.PackageNotFoundError:
            continue
    return found


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError):
        return None


def whole(least: int) -> Callable[[str], int]:
    """Return what parses a whole number of at least `least`."""

    def parse(text: str) -> int:
        if not text.strip().isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return parse
