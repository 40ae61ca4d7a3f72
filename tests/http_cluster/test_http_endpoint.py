"""The OpenAI endpoint over a cluster of HTTP instances: what clients and operators see."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from tests.helpers.asgi_driver import Caller
from tests.http_cluster.http_world import cluster_of
from tests.http_cluster.token_server import TokenServer, greedy

from headway.runtime.embedded import model_path
from headway.serving.app import create_app
from headway.serving.settings import ServerSettings
from headway.serving.tokenizer import ModelTokenizer

BODY = {"model": "headway-embedded", "prompt": [5, 9, 31], "max_tokens": 6, "temperature": 0, "return_token_ids": True}


@asynccontextmanager
async def served(*servers: TokenServer) -> AsyncIterator[tuple[FastAPI, httpx.AsyncClient]]:
    """The application over a cluster of these servers, and a client of it."""
    async with cluster_of(servers) as cluster:
        settings = ServerSettings(start_engine=False, keep_alive_s=0.05)
        app = create_app(cluster, ModelTokenizer.load(Path(model_path())), settings)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            yield app, client


async def test_an_answer_has_the_servers_tokens_and_this_processes_text() -> None:
    async with served(TokenServer(), TokenServer()) as (_, client):
        choice = (await client.post("/v1/completions", json=BODY)).json()["choices"][0]
        assert choice["token_ids"] == greedy([5, 9, 31], 6)
        assert choice["text"]
        assert choice["finish_reason"] == "length"
        report = (await client.get("/v1/cluster")).json()
        assert [each["state"] for each in report["instances"]] == ["ready", "ready"]
        assert 'headway_instance_up{instance="1"' in (await client.get("/metrics")).text.replace('engine="0",', "")
        joined = await client.post("/v1/cluster/instances", json={})
        assert joined.status_code == 400


async def test_keep_alives_are_sent_while_a_long_prompt_is_computed() -> None:
    async with served(TokenServer(prefill_s=0.1)) as (app, _):
        caller = Caller(app, "/v1/completions", {**BODY, "stream": True}, {"host": "localhost"})
        await caller.until(b": keep-alive", 2)
        await caller.done()
        tokens = [token for event in caller.events() for token in event["choices"][0]["token_ids"]]
        assert tokens == greedy([5, 9, 31], 6)


async def test_a_client_of_a_busy_cluster_gets_429_and_of_one_long_without_servers_503_with_retry_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headway.runtime.cluster.http_backend.HttpInstance.returns_s", 0.0)

    server = TokenServer(busy=1000)
    async with served(server) as (_, client):
        busy = await client.post("/v1/completions", json=BODY)
        assert (busy.status_code, float(busy.headers["retry-after"]) > 0) == (429, True)
        server.busy = 0
        await server.stop()
        while (await client.get("/v1/cluster")).json()["state"] != "recovering":
            await asyncio.sleep(0.02)
        gone = await client.post("/v1/completions", json=BODY)
        assert (gone.status_code, float(gone.headers["retry-after"]) > 0) == (503, True)
        await server.start()


@pytest.mark.parametrize("max_tokens", [1, 4096])
async def test_lengths_are_checked_before_any_server_is_asked(max_tokens: int) -> None:
    server = TokenServer(max_model_len=10)
    async with served(server) as (_, client):
        prompt = [5] * (11 - min(max_tokens, 4))
        refused = await client.post("/v1/completions", json={**BODY, "prompt": prompt, "max_tokens": max_tokens})
        assert refused.status_code == 400
        assert "maximum context length is 10" in refused.json()["error"]["message"]
        assert server.seen == []
