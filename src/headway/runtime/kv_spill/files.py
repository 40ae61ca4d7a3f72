"""Format of a file of KV blocks: safetensors with one tensor of bytes, a row a block, and checksums as metadata.

A block's key is the hash of all tokens up to its end and of the tenant's salt (`kv.prefix_index`), so that a file may
hold blocks of any prompts, and none is found by a prompt of another salt. Its checksum covers the model, the key and
the bytes: neither a damaged block nor one of another model is ever taken for the one that is asked for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import HeadwayError

FORMAT = "headway-kv-1"
_TENSOR = "kv"
_KEY_HEX = 32
_CHECK_BYTES = 16

Rows = NDArray[np.uint8]
"""(blocks, bytes of a block)."""


class BlockFileError(HeadwayError):
    """A file of KV blocks is damaged."""


class ForeignBlocksError(BlockFileError):
    """A file of KV blocks is of another model or block size."""


@dataclass(frozen=True)
class BlockFormat:
    """What the KV blocks of one engine are: blocks of another format are never read."""

    model: str
    """Hash over configuration and all weights."""
    dtype: str
    block_tokens: int
    block_bytes: int

    def mark(self) -> str:
        """Return one line that differs where any field does."""
        return f"{FORMAT} {self.model} {self.dtype} {self.block_tokens} {self.block_bytes}"

    def checksum(self, key: bytes, row: memoryview) -> str:
        """Return the checksum of a block, as hexadecimal digits."""
        digest = hashlib.blake2b(self.mark().encode() + key, digest_size=_CHECK_BYTES)
        digest.update(row)
        return digest.hexdigest()


@dataclass(frozen=True)
class BlockFileHead:
    """What is known of a file without reading its blocks."""

    name: str
    keys: tuple[bytes, ...]
    """Of its rows, in order."""
    checksums: tuple[str, ...]
    data_at: int
    """Offset of the first row in the file, in bytes."""


def encoded(blocks: BlockFormat, name: str, keys: Sequence[bytes], rows: Rows) -> tuple[BlockFileHead, bytes]:
    """Return a file's contents, and its head. `keys`: of the rows, in order."""
    from safetensors.numpy import save

    checksums = [blocks.checksum(key, row.data) for key, row in zip(keys, rows, strict=True)]
    metadata = {"format": blocks.mark(), "keys": b"".join(keys).hex(), "checksums": "".join(checksums)}
    contents = save({_TENSOR: rows}, metadata)
    return BlockFileHead(name, tuple(keys), tuple(checksums), len(contents) - rows.nbytes), contents


def read_head(blocks: BlockFormat, path: Path) -> BlockFileHead:
    """Return the head of a file. Raises BlockFileError where it is torn, ForeignBlocksError for another model."""
    # Imported here: a base install, which loads no engine, has no safetensors.
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "np") as stream:
            metadata = stream.metadata() or {}
            shape = tuple(stream.get_slice(_TENSOR).get_shape())
    except (OSError, SafetensorError) as error:
        raise BlockFileError(f"{path} is not a whole file of KV blocks ({error})") from error
    if metadata.get("format") != blocks.mark():
        raise ForeignBlocksError(f"{path} holds KV of another model or block size")
    try:
        keys = tuple(bytes.fromhex(each) for each in _pieces(metadata["keys"], _KEY_HEX))
        checksums = tuple(_pieces(metadata["checksums"], 2 * _CHECK_BYTES))
    except (KeyError, ValueError) as error:
        raise BlockFileError(f"{path} is damaged: its list of blocks cannot be read") from error
    if not len(keys) == len(checksums) == shape[0] or shape[1:] != (blocks.block_bytes,):
        raise BlockFileError(f"{path} is damaged: it lists {len(keys)} blocks and holds {shape[0]}")
    return BlockFileHead(path.name, keys, checksums, path.stat().st_size - len(keys) * blocks.block_bytes)


def read_rows(blocks: BlockFormat, folder: Path, head: BlockFileHead, first: int, count: int) -> Rows:
    """Return rows [first, first + count) of a file. Raises BlockFileError unless they are what was written."""
    path = folder / head.name
    try:
        with path.open("rb", buffering=0) as stream:
            stream.seek(head.data_at + first * blocks.block_bytes)
            rows = np.empty((count, blocks.block_bytes), dtype=np.uint8)
            got = _read_into(stream.readinto, rows.data.cast("B"))
    except OSError as error:
        raise BlockFileError(f"{path} cannot be read ({error.strerror})") from error
    whole = got == rows.nbytes and all(
        blocks.checksum(head.keys[first + i], row.data) == head.checksums[first + i] for i, row in enumerate(rows)
    )
    if not whole:
        raise BlockFileError(f"{path} is damaged: its checksums do not hold")
    return rows


def _read_into(read: object, buffer: memoryview) -> int:
    """Fill a buffer as far as the file reaches, and return the bytes read."""
    assert callable(read)
    got = 0
    while got < len(buffer) and (more := read(buffer[got:])):
        got += more
    return got


def _pieces(text: str, length: int) -> list[str]:
    """Cut a text into pieces of one length. Raises ValueError where it does not divide."""
    if len(text) % length:
        raise ValueError("the text is cut off")
    return [text[at:end] for at, end in pairwise(range(0, len(text) + 1, length))]
