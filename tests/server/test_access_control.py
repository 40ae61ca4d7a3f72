"""Keys of clients and of operators, whose request is whose, and web pages of other sites."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.helpers.asgi_driver import Caller
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.polling import eventually
from tests.server.fake_cluster import FakeClusterEngine

from headway.core.errors import ConfigError
from headway.serving.settings import ServerSettings

pytestmark = pytest.mark.anyio

BODY = {"model": "fake-model", "prompt": [5, 6, 7], "max_tokens": 6}
JOIN, LIST = ("POST", "/v1/cluster/instances"), ("GET", "/v1/cluster")


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> FakeEngine:
    return FakeClusterEngine() if "cluster" in request.node.name else FakeEngine()


@pytest.mark.parametrize(("method", "path"), [JOIN, LIST, ("DELETE", "/v1/cluster/instances/1")])
async def test_clients_keys_do_not_administer_the_cluster(connect: Any, method: str, path: str) -> None:
    async with connect(api_key="client, other", admin_key="operator") as client:
        for wrong in ({}, bearer("client"), bearer("other"), bearer("operator "), bearer("client, other")):
            assert (await client.request(method, path, headers=wrong)).status_code == 401
        assert (await client.request(method, path, headers=bearer("operator"))).status_code in (200, 202)
        for key in ("client", "other", "operator"):
            assert (await client.post("/v1/completions", json=BODY, headers=bearer(key))).status_code == 200
    async with connect(api_key="client") as client:
        assert (await client.request(method, path)).status_code == 401
        refused = await client.request(method, path, headers=bearer("client"))
        assert refused.status_code == 403
        assert "--admin-key" in refused.text
    async with connect(admin_key="operator") as client:
        assert (await client.request(method, path)).status_code == 401
        assert (await client.request(method, path, headers=bearer("operator"))).status_code in (200, 202)
        assert (await client.post("/v1/completions", json=BODY)).status_code == 200


async def test_without_a_key_a_cluster_is_administered_from_its_own_machine(application: Any) -> None:
    async with application(host="0.0.0.0") as app:
        for address, status in (("127.0.0.1", 200), ("::1", 200), ("192.0.2.7", 403)):
            transport = httpx.ASGITransport(app, client=(address, 1))
            async with httpx.AsyncClient(transport=transport, base_url="http://gateway.example") as client:
                assert (await client.get("/v1/cluster")).status_code == status
                assert (await client.post("/v1/completions", json=BODY)).status_code == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 202),
        ({"host": "127.0.0.1:8000"}, 202),
        ({"host": "[::1]:8000"}, 202),
        ({"host": "headway.localhost"}, 202),
        ({"host": "inside.example"}, 202),
        ({"origin": "http://localhost"}, 202),
        ({"origin": "https://friend.example"}, 202),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://localhost:3000"}, 403),
        ({"host": "rebound.example", "origin": "http://rebound.example"}, 403),
        ({"host": "rebound.example:8000"}, 403),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
    ],
)
async def test_web_pages_do_not_start_instances_of_a_cluster(
    connect: Any, headers: dict[str, str], status: int
) -> None:
    async with connect(allowed_origins="https://friend.example", allowed_hosts="inside.example") as client:
        answer = await client.post("/v1/cluster/instances", content=b'{"pool": 0}', headers=headers)
        assert answer.status_code == status
        if status == 403:
            assert (await client.post("/v1/completions", json=BODY, headers=headers)).status_code == 403
            assert (await client.get("/health", headers=headers)).status_code == 200


async def test_with_a_key_a_gateways_names_and_pages_are_its_own_affair(connect: Any) -> None:
    async with connect(api_key="client") as client:
        headers = {**bearer("client"), "host": "api.example", "origin": "https://app.example"}
        assert (await client.post("/v1/completions", json=BODY, headers=headers)).status_code == 200


async def test_a_cluster_takes_instances_up_to_its_limit(connect: Any) -> None:
    async with connect(max_instances=2) as client:
        refused = await client.post("/v1/cluster/instances", json={})
        assert refused.status_code == 429
        assert "and may have 2" in refused.text


async def test_a_cluster_does_not_wait_for_a_body_that_does_not_come(application: Any) -> None:
    async with application(body_timeout_s=0.05) as app:
        caller = Caller(app, "/v1/cluster/instances", b"")
        caller._body.clear()  # its body is announced and never comes
        await caller.done()
        assert caller.status == 408


async def interrupted(connect: Any, engine: FakeEngine, **settings: Any) -> None:
    """A server that is stopped, as by a crash, while two clients' requests of the same id run."""
    engine.hold = asyncio.Event()
    async with connect(**settings) as client:
        sent = [
            asyncio.create_task(
                client.post("/v1/completions", json=BODY, headers={**bearer(key), "x-request-id": "mine"})
            )
            for key in ("one", "two")
        ]
        await eventually(lambda: len(engine.submits) == 2)
        client._transport.app.state.headway.close_journal()
        for each in sent:
            each.cancel()
        await asyncio.gather(*sent, return_exceptions=True)
    engine.hold, engine.state, engine.submits = None, "starting", []


async def test_a_request_belongs_to_the_key_that_sent_it(connect: Any, engine: FakeEngine, tmp_path: Path) -> None:
    settings = {"api_key": "one,two,three", "admin_key": "operator", "journal": str(tmp_path / "j")}
    await interrupted(connect, engine, **settings)
    async with connect(**settings) as client:
        await eventually(lambda: len(engine.finished) == 2)
        path = "/v1/requests/mine"

        async def status(key: str, method: str = "GET") -> int:
            code: int = (await client.request(method, path, headers=bearer(key))).status_code
            return code

        assert [await status(key) for key in ("one", "two", "three", "four", "operator")] == [200, 200, 404, 401, 409]
        assert await status("three", "DELETE") == 404
        assert await status("one", "DELETE") == 200
        assert [await status(key) for key in ("one", "two")] == [404, 200]
        assert await status("operator", "DELETE") == 200
        assert await status("two") == 404


def test_keys_that_cannot_be_told_apart_are_refused() -> None:
    for wrong in ({"api_key": " , "}, {"admin_key": " "}, {"api_key": "a,b", "admin_key": "b"}):
        with pytest.raises(ConfigError):
            ServerSettings(**wrong)
