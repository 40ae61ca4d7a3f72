"""Text from tokens: incremental detokenization, and stop strings.

One Knuth-Morris-Pratt automaton per string is stepped once per character, so the result does not depend on how the text
is cut into pieces. The match that completes first wins; of several that complete together, the longest.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Protocol

from headway.core.errors import RequestError

if TYPE_CHECKING:
    import tokenizers


MAX_STOPS = 16
MAX_STOP_CHARS = 1024


def read_stops(value: object) -> tuple[str, ...]:
    """Validate `stop`: one string, or up to 16 non-empty ones; return them without duplicates. Raises RequestError."""
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise RequestError("'stop' must be a string or an array of strings", "stop")
    if len(items) > MAX_STOPS:
        raise RequestError(f"'stop' holds {len(items)} strings; at most {MAX_STOPS} are allowed", "stop")
    for item in items:
        if not 1 <= len(item) <= MAX_STOP_CHARS:
            raise RequestError(f"a 'stop' string must have 1..{MAX_STOP_CHARS} characters (got {len(item)})", "stop")
    return tuple(dict.fromkeys(items))


class StopMatcher:
    """Matcher over the text of one answer.

    Amortised work per character is O(number of stop strings); held-back text is shorter than the longest of them.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """include: whether the matched stop string is shown at the end of the text."""
        # Longest first: `_step` returns the first automaton that completes at a character.
        self._stops = sorted(stops, key=len, reverse=True)
        self._tables = [_failure_table(stop) for stop in self._stops]
        # Per stop string, how many of its characters the text's end matches.
        self._states = [0] * len(self._stops)
        self._held = ""
        self._include = include
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Return the text that is safe to show now; empty after a match (`matched` is set)."""
        if not self._stops or self.matched is not None:
            return text if self.matched is None else ""
        # The held text has been stepped already: only the new characters are.
        whole = self._held + text
        begin = len(self._held)
        for place, char in enumerate(text, begin):
            stop = self._step(char)
            if stop is not None:
                end = place + 1
                self._held, self.matched = "", stop
                return whole[: end if self._include else end - len(stop)]
        # The longest partial match may still become a stop string; the text before it cannot.
        keep = len(whole) - max(self._states)
        self._held = whole[keep:]
        return whole[:keep]

    def flush(self) -> str:
        """Return the held-back text at the end of the answer: an incomplete stop string is ordinary text."""
        rest, self._held = self._held, ""
        return rest

    def _step(self, char: str) -> str | None:
        """Advance all automata by one character; return the stop string that it completes, if any."""
        for which, stop in enumerate(self._stops):
            state, table = self._states[which], self._tables[which]
            # Fall back along borders until the character extends one.
            while state and stop[state] != char:
                state = table[state - 1]
            if stop[state] == char:
                state += 1
            if state == len(stop):
                return stop
            self._states[which] = state
        return None


def _failure_table(stop: str) -> list[int]:
    """Return, for each prefix, the length of its longest proper border (Knuth-Morris-Pratt)."""
    table = [0] * len(stop)
    border = 0
    for place in range(1, len(stop)):
        while border and stop[border] != stop[place]:
            border = table[border - 1]
        if stop[border] == stop[place]:
            border += 1
        table[place] = border
    return table


_REPLACEMENT = "\ufffd"


class IncrementalDetokenizer(Protocol):
    """Incremental decoder of one answer. The joined pieces equal the text of all tokens."""

    def feed(self, token: int) -> str:
        """Return the text that `token` completes; empty while a character is incomplete."""

    def flush(self) -> str:
        """Return the rest at the end of the answer: an incomplete character shows as U+FFFD."""


class SilentDetokenizer:
    """Decoder for models without a tokenizer: the text is empty."""

    def feed(self, token: int) -> str:
        """Return the empty string."""
        return ""

    def flush(self) -> str:
        """Return the empty string."""
        return ""


class ByteLevelDetokenizer:
    """Decoder for byte-level BPE: every token is a fixed byte string, so a streaming UTF-8 decoder is exact and O(1).

    table: bytes of each token id; unknown ids and those in `skip` show nothing.
    """

    def __init__(self, table: Mapping[int, bytes], skip: AbstractSet[int]) -> None:
        self._table = table
        self._skip = skip
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        """Return the characters that this token completes."""
        return "" if token in self._skip else self._decoder.decode(self._table.get(token, b""))

    def flush(self) -> str:
        """Return U+FFFD for an incomplete last character, else the empty string."""
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """Decoder for all other tokenizers: decode the newest few tokens with and without the new one; show the difference.

    The tokens shown last are the context, on which a word's leading space depends. Text that ends in U+FFFD may be an
    incomplete character and is held back for up to `PATIENCE` tokens.
    """

    PATIENCE = 4
    """A UTF-8 character has at most 4 bytes: after as many tokens U+FFFD is part of the text."""

    def __init__(self, backend: tokenizers.Tokenizer, skip: AbstractSet[int], before: Sequence[int] = ()) -> None:
        """before: tokens whose text this one continues, the last of them."""
        self._backend = backend
        self._skip = skip
        # Tokens already shown that precede `_pending`, whose text is not shown yet.
        self._context = [token for token in before if token not in skip][-2 * self.PATIENCE :]
        self._pending: list[int] = []

    def feed(self, token: int) -> str:
        """Return the text that became final with this token."""
        if token in self._skip or self._backend.id_to_token(token) is None:
            return ""
        self._pending.append(token)
        text = self._difference()
        if text.endswith(_REPLACEMENT) and len(self._pending) < self.PATIENCE:
            return ""
        return self._accept(text)

    def flush(self) -> str:
        """Return the text of the pending tokens."""
        return self._accept(self._difference()) if self._pending else ""

    def _difference(self) -> str:
        """Return the text that the pending tokens add to the context."""
        before = self._decode(self._context)
        whole = self._decode(self._context + self._pending)
        # A tokenizer may rewrite earlier text when more follows: then the pending tokens are decoded alone.
        return whole[len(before) :] if whole.startswith(before) else self._decode(self._pending)

    def _accept(self, text: str) -> str:
        # Tokens without text keep the old context; without it the next one would lose its leading space.
        self._context = self._pending if text else (self._context + self._pending)[-self.PATIENCE :]
        self._pending = []
        return text

    def _decode(self, ids: list[int]) -> str:
        return self._backend.decode(ids, skip_special_tokens=False) if ids else ""


def _byte_alphabet() -> dict[str, int]:
    """Return byte-level BPE's alphabet (GPT-2): printable Latin-1 bytes as themselves, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    shown = {chr(byte): byte for byte in printable}
    return shown | {chr(256 + place): byte for place, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


def byte_level_bytes(piece: str) -> bytes:
    """Return the bytes of a vocabulary entry. Added tokens are spelt in plain text, not in the byte alphabet."""
    try:
        return bytes([_ALPHABET[char] for char in piece])
    except KeyError:
        return piece.encode("utf-8", "replace")
