"""What servers report to have cached, from a publisher that speaks as vLLM's does."""

from __future__ import annotations

import asyncio
import json
import struct
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from tests.helpers.polling import eventually
from tests.http_cluster.http_world import ask, cluster_of, server_of
from tests.http_cluster.token_server import TokenServer

from headway.kv.text_keys import TextKeys
from headway.runtime.cluster.http_backend import HttpInstance
from headway.runtime.cluster.kv_events import KvEvents, ReportedBlocks, events_config, replay_address

BLOCK = 4
TEXT = list(range(10, 30))


def keys(text: Sequence[int], salt: str = "") -> list[bytes]:
    return TextKeys(struct.pack(f"<{len(text)}i", *text), BLOCK, salt).keys


def hashes(text: Sequence[int], salt: str = "") -> list[bytes]:
    """The server's own: others than ours."""
    return [b"vllm" + key for key in keys(text, salt)]


def stored(text: Sequence[int], first: int = 0, salt: str = "", **fields: Any) -> dict[str, Any]:
    """The event of a text's blocks from `first` on."""
    chain = hashes(text, salt)
    own = [[salt] if salt and not i else None for i in range(first, len(chain))]
    return {
        "type": "BlockStored", "block_hashes": chain[first:], "parent_block_hash": chain[first - 1] if first else None,
        "token_ids": list(text[first * BLOCK : len(chain) * BLOCK]), "block_size": BLOCK, "lora_id": None,
        "medium": "GPU", "lora_name": None, "extra_keys": own, "group_idx": 0, **fields,
    }  # fmt: skip


def removed(*blocks: bytes) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(blocks), "medium": "GPU", "group_idx": 0}


CLEARED = {"type": "AllBlocksCleared"}


def batch(*events: Any) -> bytes:
    return msgspec.msgpack.encode([1.5, events, 0])


def reported(*events: Any) -> ReportedBlocks:
    blocks = ReportedBlocks()
    for number, event in enumerate(events):
        blocks.take(number, batch(event))
    return blocks


def test_blocks_are_cached_from_their_storing_to_their_removal() -> None:
    first, second = stored(TEXT[:8]), stored(TEXT, 2)
    assert reported(first).match(keys(TEXT)) == 2
    assert reported(first, second).match(keys(TEXT)) == 5
    assert reported(first, second, removed(hashes(TEXT)[4])).match(keys(TEXT)) == 4
    assert reported(first, second, removed(hashes(TEXT)[1])).match(keys(TEXT)) == 1
    assert reported(first, second, CLEARED).match(keys(TEXT)) == 0
    assert reported(first, CLEARED, second).match(keys(TEXT)) == 0
    assert reported(first, second).match(keys([*TEXT[:9], 7, *TEXT[10:]])) == 2
    named = [["BlockStored", *list(event.values())[1:]] for event in (first, second)]
    assert reported(*named, ["BlockRemoved", [hashes(TEXT)[4]], "GPU"]).match(keys(TEXT)) == 4


@pytest.mark.parametrize(
    "event",
    [
        stored(TEXT, 1), stored(TEXT, lora_id=1), stored(TEXT, medium="CPU"), stored(TEXT, group_idx=1),
        stored(TEXT, extra_keys=[["image", 0]] + [None] * 4), stored(TEXT, extra_keys=[[["image", 0]]] + [None] * 4),
        stored(TEXT, extra_keys=[[b"digest"]] + [None] * 4), {"type": "BlockStored"}, {"type": "Another"}, [], 7,
    ],
)  # fmt: skip
def test_what_is_no_text_behind_known_blocks_is_not_taken_for_cached(event: Any) -> None:
    assert reported(event).match(keys(TEXT)) == 0
    assert reported(event, stored(TEXT)).match(keys(TEXT)) == 5


def test_texts_of_another_salt_are_others() -> None:
    blocks = reported(stored(TEXT, salt="a"))
    assert blocks.match(keys(TEXT, "a")) == 5
    assert blocks.match(keys(TEXT)) == blocks.match(keys(TEXT, "b")) == 0


def test_a_block_that_is_there_twice_stays_until_both_are_removed() -> None:
    twice = stored(TEXT), stored(TEXT)
    assert reported(*twice, removed(hashes(TEXT)[1])).match(keys(TEXT)) == 5
    assert reported(*twice, removed(hashes(TEXT)[1]), removed(hashes(TEXT)[1])).match(keys(TEXT)) == 1


def test_an_event_that_is_not_understood_hides_none_of_its_batch() -> None:
    blocks = reported(stored(TEXT))
    blocks.take(1, batch({"type": "BlockStored"}, removed(hashes(TEXT)[0])))
    assert blocks.match(keys(TEXT)) == 0


def test_started_servers_publish_where_no_other_host_or_user_can_read(tmp_path: Path) -> None:
    config, address = events_config(Path("/run/headway/kv-0"))
    assert address == "ipc:///run/headway/kv-0"
    told = json.loads(config)
    assert (told["endpoint"], told["replay_endpoint"]) == (address, replay_address(address))
    assert replay_address("tcp://10.0.0.1:5557") == "tcp://10.0.0.1:5558"
    config, address = events_config(tmp_path / ("x" * 100))
    assert (json.loads(config), address) == ({"enable_kv_cache_events": False}, None)


@pytest.fixture
def endpoint() -> Iterator[str]:
    """An address whose path is short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="kv") as folder:
        yield f"ipc://{folder}/kv"


class Publisher:
    """The sockets of one server's events, and the batches that it can still send again."""

    def __init__(self, endpoint: str, replays: bool = True) -> None:
        self._pub = zmq.asyncio.Context.instance().socket(zmq.PUB)
        self._pub.bind(endpoint)
        self._router = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        self.buffer: list[tuple[int, bytes]] = []
        self.number = 0
        if replays:
            self._router.bind(replay_address(endpoint))
        self._task = asyncio.create_task(self._serve())

    async def _serve(self) -> None:
        while True:
            name, _, start = await self._router.recv_multipart()
            for number, payload in self.buffer:
                if number >= int.from_bytes(start, "big"):
                    await self._router.send_multipart((name, b"", b"", number.to_bytes(8, "big"), payload))
            await self._router.send_multipart((name, b"", b"", (-1).to_bytes(8, "big", signed=True), b""))

    async def publish(self, *events: Any, lost: bool = False) -> None:
        """Publish a batch; `lost`: no subscriber gets it."""
        payload, number = batch(*events), self.number
        self.buffer.append((number, payload))
        self.number += 1
        if not lost:
            await self._pub.send_multipart((b"", number.to_bytes(8, "big"), payload))

    def close(self) -> None:
        self._task.cancel()
        self._pub.close(0)
        self._router.close(0)


async def heard(publisher: Publisher, events: KvEvents) -> None:
    """Wait until a subscription, which takes its time, brings what is published."""
    while events.blocks.expected < publisher.number or not publisher.number:
        await publisher.publish(removed(b"none"))
        await asyncio.sleep(0.02)


@asynccontextmanager
async def subscribed(endpoint: str, replays: bool = True) -> AsyncIterator[tuple[Publisher, KvEvents]]:
    """A server and a subscription that hears it and knows `TEXT`."""
    publisher, events = Publisher(endpoint, replays), KvEvents(endpoint)
    try:
        events.start()
        await heard(publisher, events)
        await publisher.publish(stored(TEXT))
        await eventually(lambda: events.blocks.match(keys(TEXT)) == 5)
        yield publisher, events
    finally:
        events.stop()
        publisher.close()
    assert events.blocks.match(keys(TEXT)) == 0


async def test_a_gap_is_replayed_and_what_was_before_the_subscription_too(endpoint: str) -> None:
    async with subscribed(endpoint) as (publisher, events):
        await publisher.publish(stored([7] * 8), lost=True)
        await publisher.publish(removed(hashes(TEXT)[4]))
        await eventually(lambda: events.blocks.expected == publisher.number)
        later = KvEvents(endpoint)
        later.start()
        await eventually(lambda: later.blocks.expected == publisher.number)
        for blocks in (events.blocks, later.blocks):
            assert (blocks.match(keys(TEXT)), blocks.match(keys([7] * 8))) == (4, 2)
        later.stop()


@pytest.mark.parametrize("replays", [True, False])
async def test_a_gap_that_cannot_be_filled_clears_what_was_known(
    endpoint: str, replays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.runtime.cluster.kv_events._REPLAY_S", 0.05 if not replays else 30.0)

    async with subscribed(endpoint, replays) as (publisher, events):
        await publisher.publish(removed(*hashes(TEXT)), lost=True)
        publisher.buffer.clear()
        await publisher.publish(stored([7] * 8))
        await eventually(lambda: events.blocks.match(keys([7] * 8)) == 2)
        assert events.blocks.match(keys(TEXT)) == 0


async def test_numbers_that_begin_again_are_of_another_process(endpoint: str) -> None:
    async with subscribed(endpoint) as (publisher, events):
        publisher.buffer.clear()
        publisher.number = 0
        await publisher.publish(stored([7] * 8))
        await eventually(lambda: events.blocks.match(keys([7] * 8)) == 2)
        assert events.blocks.match(keys(TEXT)) == 0


async def test_another_protocol_ends_the_subscription_and_leaves_nothing_known(endpoint: str) -> None:
    async with subscribed(endpoint) as (publisher, events):
        await publisher._pub.send(b"hello")
        await eventually(lambda: not events.blocks.block_tokens)


async def test_turns_go_where_a_server_says_that_their_text_is_cached(endpoint: str) -> None:
    """Not where it was sent: that server has evicted it."""

    endpoints = [endpoint, f"{endpoint}-second"]
    publishers = [Publisher(each) for each in endpoints]
    servers = [TokenServer(gap_s=0.001), TokenServer(gap_s=0.001)]
    try:
        async with cluster_of(servers, options={"affinity": True}, kv_events=endpoints) as cluster:
            text = [2 + i % 99 for i in range(300)]
            await ask(cluster, "a", text, 3)
            assert [len(server.seen) for server in servers] == [1, 0]

            def subscription(instance: HttpInstance) -> KvEvents:
                assert instance._events is not None
                return instance._events

            for number, publisher in enumerate(publishers):
                await heard(publisher, subscription(server_of(cluster, number)))
            await publishers[0].publish(stored([5] * 8))
            await publishers[1].publish(stored(text))
            known = [subscription(server_of(cluster, i)).blocks for i in range(2)]
            await eventually(lambda: all(blocks.block_tokens for blocks in known))
            await ask(cluster, "b", [*text, 7], 3)
            assert [len(server.seen) for server in servers] == [1, 1]
            await servers[1].stop()
            await eventually(lambda: cluster.registry[1].state == "lost")
            assert not subscription(server_of(cluster, 1)).blocks.block_tokens
    finally:
        for publisher in publishers:
            publisher.close()
