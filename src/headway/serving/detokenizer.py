"""Tokens to text, one token at a time, at a cost that does not grow with the answer. Never emits half a character."""

from __future__ import annotations

import codecs
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import tokenizers

_REPLACEMENT = "\ufffd"


class IncrementalDetokenizer(Protocol):
    """The incremental decoder of one answer. The pieces joined equal the text of all tokens."""

    def feed(self, token: int) -> str:
        """The text that `token` completes; empty while a character is still in parts."""

    def flush(self) -> str:
        """What is left at the end: a character that never became whole shows as U+FFFD."""


class SilentDetokenizer:
    """For models without a tokenizer: the text is empty."""

    def feed(self, token: int) -> str:
        """Nothing."""
        return ""

    def flush(self) -> str:
        """Nothing."""
        return ""


class ByteLevelDetokenizer:
    """For byte-level BPE: every token is a fixed byte string, so a streaming UTF-8 decoder is exact and O(1).

    `table` maps ids to bytes; unknown ids and those in `skip` show nothing.
    """

    def __init__(self, table: Mapping[int, bytes], skip: AbstractSet[int]) -> None:
        self._table = table
        self._skip = skip
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        """The characters that became whole with this token."""
        return "" if token in self._skip else self._decoder.decode(self._table.get(token, b""))

    def flush(self) -> str:
        """The last character, if it never became whole."""
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For all other tokenizers: decode the newest few tokens with and without the new one, and show the difference.

    The tokens shown last give the context (a word's leading space depends on it). Text that ends in U+FFFD may be a
    character in parts, and waits; a character has at most 4 bytes, so after `PATIENCE` tokens it is not one.
    """

    PATIENCE = 4

    def __init__(self, backend: tokenizers.Tokenizer, skip: AbstractSet[int]) -> None:
        self._backend = backend
        self._skip = skip
        self._context: list[int] = []
        self._pending: list[int] = []

    def feed(self, token: int) -> str:
        """The text that became final with this token."""
        if token in self._skip or self._backend.id_to_token(token) is None:
            return ""
        self._pending.append(token)
        text = self._difference()
        if text.endswith(_REPLACEMENT) and len(self._pending) < self.PATIENCE:
            return ""
        return self._accept(text)

    def flush(self) -> str:
        """The text of the tokens still waiting."""
        return self._accept(self._difference()) if self._pending else ""

    def _difference(self) -> str:
        before = self._decode(self._context)
        whole = self._decode(self._context + self._pending)
        return whole[len(before) :] if whole.startswith(before) else self._decode(self._pending)

    def _accept(self, text: str) -> str:
        # Tokens that show nothing keep the old context, else the next one would be taken for the text's first.
        self._context = self._pending if text else (self._context + self._pending)[-self.PATIENCE :]
        self._pending = []
        return text

    def _decode(self, ids: list[int]) -> str:
        return self._backend.decode(ids, skip_special_tokens=False) if ids else ""


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE's alphabet: printable Latin-1 bytes stand for themselves, the others for U+0100 and on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    shown = {chr(byte): byte for byte in printable}
    return shown | {chr(256 + place): byte for place, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


def byte_level_bytes(piece: str) -> bytes:
    """The bytes of a vocabulary entry. Added tokens are spelt in plain text: they stand for their own UTF-8."""
    try:
        return bytes([_ALPHABET[char] for char in piece])
    except KeyError:
        return piece.encode("utf-8", "replace")
