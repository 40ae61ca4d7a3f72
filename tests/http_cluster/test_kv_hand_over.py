"""Prefill on one server and decode on another: the same answer, and no KV left behind wherever the client leaves."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any

import aiohttp.web
import pytest
from tests.http_cluster.http_world import ask, cluster_of
from tests.http_cluster.token_server import TokenServer, greedy

from headway.core.errors import HeadwayError
from headway.runtime.cluster.http_server import (
    HttpServer,
    KvHandOver,
    ServerBusyError,
    ServerGoneError,
    open_session,
    prefill_body,
)

PROMPT = [5, 9, 200, 31]
Begin = Callable[..., KvHandOver]


@asynccontextmanager
async def pair(**faults: Any) -> AsyncIterator[tuple[TokenServer, TokenServer, Begin]]:
    """A server that prefills, one that decodes, and what begins a request on them."""
    source = TokenServer(prefill_s=0.005)
    target = TokenServer(prefill_s=0.002, gap_s=0.002, peers=[source], **faults)
    await source.start()
    await target.start()
    async with open_session() as session:
        ends = HttpServer(source.url, session), HttpServer(target.url, session)

        def begin(name: str, output: int = 8) -> KvHandOver:
            body = {"prompt": PROMPT, "max_tokens": output, "min_tokens": 2, "stream": True, "return_token_ids": True}
            return KvHandOver(*ends, body, {"X-Request-Id": name})

        try:
            yield source, target, begin
        finally:
            await source.stop()
            await target.stop()


async def answer(legs: KvHandOver) -> list[int]:
    async with aclosing(legs.pieces()) as pieces:
        return [token async for piece in pieces for token in piece.tokens]


async def quiet(*servers: TokenServer) -> None:
    while any(server.running for server in servers):
        await asyncio.sleep(0.005)


def test_the_prefill_leg_asks_for_one_token_and_drops_what_is_of_the_answer() -> None:
    body = prefill_body({"prompt": [1], "max_tokens": 9, "min_tokens": 3, "stream": True, "seed": 4})
    assert body.pop("kv_transfer_params")["do_remote_decode"] is True
    assert body == {"prompt": [1], "max_tokens": 1, "stream": False, "seed": 4}


async def test_the_answer_is_one_servers_and_both_legs_have_the_same_request_id() -> None:
    async with pair() as (source, target, begin):
        assert await answer(begin("r")) == greedy(PROMPT, 8)
        assert [held.headers["x-request-id"] for held in (*source.seen, *target.seen)] == ["r", "r"]
        assert target.seen[0].body["kv_transfer_params"]["remote_port"] == source.port
        assert source.kept == set()


async def test_a_client_that_leaves_during_the_prefill_ends_it_and_no_decode_begins() -> None:
    async with pair() as (source, target, begin):
        source.prefill_s = 1.0
        asked = asyncio.create_task(answer(begin("r")))
        while not source.running:
            await asyncio.sleep(0.005)
        asked.cancel()
        await quiet(source)
        assert (source.seen[0].ended, source.kept, target.seen) == ("aborted", set(), [])


async def test_a_hundred_clients_that_leave_at_any_time_leave_no_kv_of_a_decode_leg_behind() -> None:
    seeded = random.Random(3)
    async with pair() as (source, target, begin):

        async def one(number: int) -> None:
            asked = asyncio.create_task(answer(begin(f"r{number}")))
            await asyncio.sleep(seeded.uniform(0, 0.06))
            asked.cancel()
            with suppress(asyncio.CancelledError):
                assert await asked == greedy(PROMPT, 8)

        for first in range(0, 100, 10):
            await asyncio.gather(*(one(number) for number in range(first, first + 10)))
        await asyncio.sleep(0.05)
        await quiet(source, target)
        # A prefill that had been answered as its connection was closed: the lease frees that.
        crossed = {name for name in source.kept if name not in {h.headers["x-request-id"] for h in target.seen}}
        assert source.kept == crossed
        assert {held.ended for held in target.seen} <= {"aborted", "finished"}


@pytest.mark.parametrize(
    ("fault", "error"), [({"busy": 1}, ServerBusyError), ({"break_after": 0}, ServerGoneError)], ids=["busy", "broken"]
)
async def test_a_decode_server_that_fails_is_reported_as_by_one_server(
    fault: dict[str, Any], error: type[HeadwayError]
) -> None:
    async with pair(**fault) as (_, _, begin):
        with pytest.raises(error):
            await answer(begin("r"))


async def test_a_prefill_server_without_the_connector_is_named_with_what_to_do() -> None:
    async with pair() as (source, _, begin):

        async def plain(held: Any) -> Any:
            return aiohttp.web.json_response({"choices": []})

        source._prefill = plain  # type: ignore[method-assign]
        with pytest.raises(ServerGoneError, match="NixlConnector"):
            await answer(begin("r"))


async def test_a_cluster_with_a_prefill_pool_hands_every_request_over_and_works_without_it() -> None:
    source = TokenServer(prefill_s=0.001)
    targets = [TokenServer(gap_s=0.001, peers=[source]) for _ in range(2)]
    async with cluster_of(targets, prefill=[source]) as cluster:
        answers = await asyncio.gather(*(ask(cluster, f"r{i}", [i + 2, 3, 4], 10) for i in range(8)))
        assert answers == [greedy([i + 2, 3, 4], 10) for i in range(8)]
        assert (len(source.seen), source.kept) == (8, set())
        # How many each: by the load at that moment, and a slow machine has answered some before it asks the last.
        assert sum(len(target.seen) for target in targets) == 8
        # Killed in the midst of prefills, which begin again where they decode.
        source.prefill_s = 1.0
        asked = [asyncio.create_task(ask(cluster, f"s{i}", [i + 2, 3], 10)) for i in range(4)]
        while source.running < 4:
            await asyncio.sleep(0.005)
        await source.stop()
        assert await asyncio.gather(*asked) == [greedy([i + 2, 3], 10) for i in range(4)]


async def test_a_client_of_a_cluster_that_leaves_between_the_legs_leaves_no_kv_behind() -> None:
    source = TokenServer(prefill_s=0.001)
    target = TokenServer(prefill_s=0.05, peers=[source])
    async with cluster_of([target], prefill=[source]) as cluster:
        asked = asyncio.create_task(ask(cluster, "r", PROMPT, 1000))
        while not target.running:
            await asyncio.sleep(0.002)
        assert source.kept
        asked.cancel()
        while source.kept or target.running:
            await asyncio.sleep(0.005)
        assert not cluster.report().requests


async def test_a_completion_does_not_meet_a_server_that_closes_its_idle_connection() -> None:
    async def one_answer_a_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        page = b'{"kv_transfer_params": {"remote_port": 1}}'
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(page) + page
        )
        await writer.drain()
        # The next request on this connection, if there is one, comes while the server closes it.
        await reader.read(1)
        writer.close()

    server = await asyncio.start_server(one_answer_a_connection, "127.0.0.1", 0)
    async with server, open_session() as session:
        end = HttpServer(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", session)
        assert await end.healthy()
        assert await end.prefill({}, {}) == {"remote_port": 1}
        assert await end.prefill({}, {}) == {"remote_port": 1}
