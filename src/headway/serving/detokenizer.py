"""Incremental detokenization at constant cost per token; incomplete characters are held back."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import tokenizers

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
