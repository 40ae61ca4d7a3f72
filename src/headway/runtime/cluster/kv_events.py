"""What a server reports to have cached: vLLM's KV events (`--kv-events-config`), in place of `AssumedKeys`.

vLLM publishes batches over ZeroMQ, with sequence numbers from 0, and sends those that it still has again on request, by
convention from the next port; servers that the cluster starts do so on sockets in its own folder. Block hashes are
vLLM's own; from the token ids of the events the same chain of keys is computed here as for prompts (`kv.text_keys`).
Blocks whose parents are not known count as not cached.
"""

from __future__ import annotations

import asyncio
import json
import logging
import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from headway.kv.text_keys import child_key, root_key

log = logging.getLogger("headway.cluster")

_LONGEST_ADDRESS = 100
"""Of a Unix socket's path 107 bytes may be used."""
_REPLAY_S = 2.0
"""Seconds that a server has to send each batch of a replay."""
_FIELDS = {
    "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name",
                    "extra_keys", "group_idx"),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
}  # fmt: skip
"""Fields of events that older versions send without names, in order."""


def events_config(path: Path) -> tuple[str, str | None]:
    """Return the value of `--kv-events-config` with which a server publishes on a socket of this host, and its address.

    Events hold the tokens of all prompts: other users must not reach them. Without an address where the path is too
    long for a socket: the server then publishes nothing."""
    address = f"ipc://{path}"
    if len(replay_address(address)) > _LONGEST_ADDRESS:
        return json.dumps({"enable_kv_cache_events": False}), None
    return json.dumps({
        "enable_kv_cache_events": True, "publisher": "zmq", "endpoint": address,
        "replay_endpoint": replay_address(address),
    }), address  # fmt: skip


def replay_address(endpoint: str) -> str:
    """Return where the server at `endpoint` sends batches again: on the next port, or a socket beside."""
    if endpoint.startswith("ipc://"):
        return f"{endpoint}-replay"
    address, _, port = endpoint.rpartition(":")
    return f"{address}:{int(port) + 1}"


class ReportedBlocks:
    """Keys of the blocks that a server has said to have cached. Independent of time and of sockets."""

    def __init__(self) -> None:
        self.expected = 0
        """Sequence number of the next batch."""
        self.block_tokens = 0
        """Tokens of the server's blocks; 0: it has not stored any."""
        self._keys: dict[int | bytes, bytes] = {}
        """Own key of each block, by the server's hash."""
        self._copies: Counter[int | bytes] = Counter()
        """How often the server has each block: equal prompts that are computed at once have one each."""
        self._cached: set[bytes] = set()

    def clear(self, expected: int = 0) -> None:
        """Forget all blocks; `expected` is the number of the next batch."""
        self._keys.clear()
        self._copies.clear()
        self._cached.clear()
        self.expected = expected

    def match(self, keys: Sequence[bytes]) -> int:
        """Return how many blocks of a prompt are cached."""
        return next((i for i, key in enumerate(keys) if key not in self._cached), len(keys))

    def take(self, number: int, payload: bytes) -> None:
        """Take in a batch. What is not understood changes nothing."""
        self.expected = number + 1
        try:
            events = list(msgspec.msgpack.decode(payload)[1])
        except (msgspec.DecodeError, LookupError, TypeError) as error:
            log.debug("a batch of KV events is not understood: %r", error)
            return
        for event in events:
            try:
                self._apply(event)
            except (AttributeError, LookupError, TypeError, ValueError, struct.error) as error:
                log.debug("a KV event is not understood: %r", error)

    def _apply(self, event: Mapping[str, Any] | Sequence[Any]) -> None:
        if not isinstance(event, Mapping):
            kind = event[0]
            fields = dict(zip(_FIELDS.get(kind, ()), event[1:], strict=False))
        else:
            kind, fields = event["type"], dict(event)
        if kind == "AllBlocksCleared":
            self.clear(self.expected)
        # One group of layers stands for all; other tiers and adapters' blocks are none of a prompt's.
        elif fields.get("group_idx") or fields.get("medium") not in (None, "GPU") or fields.get("lora_id") is not None:
            return
        elif kind == "BlockStored":
            for block, key in self._chain(fields):
                self._keys[block] = key
                self._copies[block] += 1
                self._cached.add(key)
        elif kind == "BlockRemoved":
            for block in fields["block_hashes"]:
                self._copies[block] -= 1
                if self._copies[block] <= 0:
                    del self._copies[block]
                    self._cached.discard(self._keys.pop(block, b""))

    def _chain(self, stored: Mapping[str, Any]) -> Iterator[tuple[int | bytes, bytes]]:
        """Yield the server's hash and the own key of each block, as far as it is text alone behind a known parent."""
        size, parent = stored["block_size"], stored["parent_block_hash"]
        extra = stored.get("extra_keys") or [None] * len(stored["block_hashes"])
        salt = extra[0] if parent is None and extra[0] else ()
        # A lone key may also be an image's, or embeddings'.
        if len(salt) > 1 or (salt and not isinstance(salt[0], str)) or self.block_tokens not in (0, size):
            return
        key = root_key(*salt) if parent is None else self._keys.get(parent)
        for i, block in enumerate(stored["block_hashes"]):
            if key is None or (extra[i] and not (i == 0 and salt)):
                return
            self.block_tokens = size
            key = child_key(key, struct.pack(f"<{size}i", *stored["token_ids"][i * size : (i + 1) * size]))
            yield block, key


class KvEvents:
    """Subscription to one server's events, for as long as it serves."""

    def __init__(self, endpoint: str) -> None:
        """endpoint: where it publishes, such as `tcp://10.0.0.1:5557`."""
        self._endpoint, self._replay_endpoint = endpoint, replay_address(endpoint)
        self.blocks = ReportedBlocks()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin with what the server still has of its events: it serves. Needs a running event loop."""
        self.stop()
        self._task = asyncio.get_running_loop().create_task(self._follow())

    def stop(self) -> None:
        """Forget all: the server is gone. Harmless when repeated."""
        if self._task is not None:
            self._task.cancel()
        self._task = None
        self.blocks = ReportedBlocks()

    async def _follow(self) -> None:
        try:
            await self._subscribe(self.blocks)
        except Exception as error:  # what it publishes is not ours: then what was sent counts again
            log.warning("no KV events from %s any more: %s", self._endpoint, error)
            self.blocks = ReportedBlocks()

    async def _subscribe(self, blocks: ReportedBlocks) -> None:
        newest = -1
        with zmq.asyncio.Context.instance().socket(zmq.SUB) as socket:
            socket.linger = 0
            socket.subscribe(b"")
            socket.connect(self._endpoint)
            await self._replay(blocks)
            while True:
                number, payload = (await socket.recv_multipart())[-2:]
                at = int.from_bytes(number, "big")
                # A replay may be ahead of what was published; numbers that go back are another process's.
                if at <= newest:
                    blocks.clear()
                    blocks.block_tokens = 0
                newest = at
                if at > blocks.expected:
                    await self._replay(blocks)
                if at > blocks.expected:
                    # Nothing brings what is missing any more, removals among it.
                    blocks.clear(at)
                if at == blocks.expected:
                    blocks.take(at, payload)

    async def _replay(self, blocks: ReportedBlocks) -> None:
        """Take in the batches that the server still has, from the expected one on, if it answers."""
        with zmq.asyncio.Context.instance().socket(zmq.DEALER) as socket, suppress(TimeoutError):
            socket.linger = 0
            socket.connect(self._replay_endpoint)
            await socket.send_multipart((b"", blocks.expected.to_bytes(8, "big")))
            while True:
                async with asyncio.timeout(_REPLAY_S):
                    number, payload = (await socket.recv_multipart())[-2:]
                at = int.from_bytes(number, "big", signed=True)
                # -1 is the end.
                if at < 0:
                    return
                if at > blocks.expected:
                    blocks.clear(at)
                if at == blocks.expected:
                    blocks.take(at, payload)
                    # Thousands may come: answers of the cluster go on between them.
                    await asyncio.sleep(0)
