"""Keys of KV blocks: a hash chain over a text. A server computes them too, so nothing heavy is imported here.

A block's key stands for all tokens up to the block's end (vLLM's hash chain: the hash of the parent's key and of the
block's tokens), so one hash table finds the longest cached prefix.
"""

from __future__ import annotations

import hashlib

KEY_BYTES = 16
"""Bytes of a block's key: 128 bits of BLAKE2b, so that prompts cannot be made to collide."""


def root_key(salt: str = "") -> bytes:
    """Return the key that stands before a text's first block."""
    # BLAKE2b's own `key` parameter would cost a block of compression for each; the root key carries the salt once.
    return hashlib.blake2b(salt.encode(), digest_size=KEY_BYTES, person=b"headway-prefix").digest()


def child_key(parent: bytes, block: bytes | bytearray | memoryview) -> bytes:
    """Return the key of a block of int32 token ids, little-endian, behind the block of the key `parent`."""
    # The parent's key first: equal tokens behind different prefixes have different keys.
    return hashlib.blake2b(parent + block, digest_size=KEY_BYTES).digest()


class TextKeys:
    """Keys of the full blocks of a text that grows: a prompt, then the tokens of its answer."""

    __slots__ = ("_bytes", "_last", "_tail", "keys")

    def __init__(self, token_ids: bytes | memoryview, block_tokens: int, salt: str = "") -> None:
        """`token_ids`: those of the prompt, int32, little-endian."""
        self._bytes = 4 * block_tokens
        self._last = root_key(salt)
        self.keys: list[bytes] = []
        """In order; the list itself grows."""
        ids = memoryview(token_ids).cast("B")
        full = ids.nbytes - ids.nbytes % self._bytes
        for start in range(0, full, self._bytes):
            self._add(ids[start : start + self._bytes])
        self._tail = bytearray(ids[full:])

    def append(self, token: int) -> bool:
        """Add one token of the answer. Return whether a block is full with it, and so has a key."""
        self._tail += token.to_bytes(4, "little")
        if len(self._tail) < self._bytes:
            return False
        self._add(self._tail)
        self._tail = bytearray()
        return True

    def _add(self, block: memoryview | bytearray) -> None:
        self._last = child_key(self._last, block)
        self.keys.append(self._last)
