"""Long documents with a passkey hidden in them, made of the standard library's sources.

The demo and ``scripts/eval_passkey.py`` use them: every machine has the text, and the answer is known.
"""

from __future__ import annotations

import functools
import os
import random
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["COMPLETION_CUE", "QUESTION", "PasskeyDocument", "make_document", "needle"]

QUESTION = "What is the passkey?"
COMPLETION_CUE = "\nWhat is the passkey? The passkey is"
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"})
_SHORTEST_FILE = 400


@dataclass(frozen=True)
class PasskeyDocument:
    """A document with a hidden passkey."""

    text: str
    passkey: str
    """The hidden digits."""
    depth: float
    """The share of the text before the passkey."""

    @property
    def prompt(self) -> str:
        """The document with a cue that a plain completion continues with the passkey."""
        return self.text + COMPLETION_CUE

    @property
    def message(self) -> str:
        """The document with the question, to send as the user's chat message."""
        return f"{self.text}\n{QUESTION}"


def needle(passkey: str) -> str:
    """The sentence that hides a passkey."""
    return f"The passkey is {passkey}. Remember it.\n"


@functools.lru_cache(maxsize=1)
def _sources() -> tuple[Path, ...]:
    """The standard library's source files in a fixed order, without its tests and without installed packages."""
    found = []
    for folder, names, files in os.walk(sysconfig.get_paths()["stdlib"]):
        names[:] = sorted(set(names) - _SKIPPED_FOLDERS)
        found += [Path(folder, name) for name in files if name.endswith(".py")]
    return tuple(sorted(path for path in found if path.stat().st_size >= _SHORTEST_FILE))


def _lines(budget: int, rng: random.Random, count_tokens: Callable[[str], int]) -> list[str]:
    """Lines of randomly chosen source files, about ``budget`` tokens of them."""
    lines: list[str] = []
    order: list[Path] = []
    while budget > 0:
        if not order:
            # Every file once before any file is repeated.
            order = rng.sample(_sources(), len(_sources()))
        text = order.pop().read_text(encoding="utf-8", errors="replace")
        if "passkey" in text.lower():  # its own talk of passkeys would make the answer ambiguous
            continue
        used = count_tokens(text)
        if used > budget:
            cut = text.rfind("\n", 0, max(1, len(text) * budget // used)) + 1
            text = text[:cut] or text[: text.find("\n") + 1]
            used = budget
        lines += text.splitlines(keepends=True)
        if not lines[-1].endswith("\n"):
            lines[-1] += "\n"
        budget -= used
    return lines


def make_document(tokens: int, seed: int, count_tokens: Callable[[str], int]) -> PasskeyDocument:
    """Build a document of about ``tokens`` tokens with a passkey of five to seven digits at a random depth.

    The same arguments give the same document under one Python installation. ``count_tokens`` says how many tokens a
    text has; it is called once per source file, so a fast tokenizer matters more than an exact one.
    """
    rng = random.Random(f"passkey-{seed}-{tokens}")
    digits = rng.randint(5, 7)
    passkey = str(rng.randrange(10 ** (digits - 1), 10**digits))
    line = needle(passkey)
    lines = _lines(max(1, tokens - count_tokens(line)), rng, count_tokens)
    place = rng.randint(0, len(lines))
    before, after = "".join(lines[:place]), "".join(lines[place:])
    return PasskeyDocument(before + line + after, passkey, len(before) / max(1, len(before) + len(after)))
