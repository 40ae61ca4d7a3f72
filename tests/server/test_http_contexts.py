"""/v1/contexts: prepared documents, their states, their end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from tests.helpers.fake_engine import INFO, FakeEngine

from headway.runtime.engine.protocol import OutputDelta, SubmitRequest

pytestmark = pytest.mark.anyio

BODY = {"model": "fake-model", "messages": [{"role": "user", "content": "a document"}]}


def prepared(submit: SubmitRequest, ids: list[int]) -> Iterable[OutputDelta]:
    yield OutputDelta(id=submit.id)
    yield OutputDelta(id=submit.id, finish="abort", error="its KV made way")


@pytest.fixture
def engine() -> FakeEngine:
    # The gate: the engine holds the request after the first delta.
    info = msgspec.structs.replace(INFO, prefix_cache=True)
    return FakeEngine(info_value=info, script=prepared, gate=asyncio.Semaphore(0))


async def _status(client: Any, name: str, wanted: str) -> dict[str, Any]:
    for _ in range(1000):
        shown: dict[str, Any] = (await client.get(f"/v1/contexts/{name}")).json()
        if shown["status"] == wanted:
            return shown
        await asyncio.sleep(0.002)
    raise AssertionError(f"{shown} is never {wanted}")


async def test_a_document_is_pending_then_ready_then_deleted(connect: Any, engine: FakeEngine) -> None:
    async with connect() as client:
        made = await client.post("/v1/contexts", json=BODY)
        shown = made.json()
        assert (made.status_code, shown["object"], shown["status"]) == (201, "context", "pending")
        assert shown["expires_at"] == shown["created_at"] + 3600
        ready = await _status(client, shown["id"], "ready")
        assert (ready["tokens"], ready["error"]) == (engine.submits[0].prompt_tokens, None)
        assert engine.submits[0].pin
        assert engine.submits[0].priority == 2**63 - 1
        assert (await client.get("/v1/contexts")).json()["data"] == [ready]
        assert (await client.delete(f"/v1/contexts/{shown['id']}")).json()["deleted"]
        for _ in range(1000):
            if engine.aborted:
                break
            await asyncio.sleep(0.002)
        assert engine.aborted == [shown["id"]]
        assert (await client.get(f"/v1/contexts/{shown['id']}")).status_code == 404


async def test_a_chat_begins_as_the_document_does(connect: Any, engine: FakeEngine) -> None:
    async with connect() as client:
        name = (await client.post("/v1/contexts", json=BODY)).json()["id"]
        await _status(client, name, "ready")
        engine.script = None
        assert engine.gate is not None
        engine.gate.release()
        await client.post("/v1/chat/completions", json={**BODY, "max_tokens": 1})
    document, chat = engine.prompts
    assert chat[: len(document)] == document
    assert engine.submits[0].cache_salt == engine.submits[1].cache_salt


async def test_its_end_has_a_reason(connect: Any, engine: FakeEngine) -> None:
    async with connect() as client:
        late = (await client.post("/v1/contexts", json={**BODY, "ttl": 0.02})).json()["id"]
        assert (await _status(client, late, "released"))["error"] == "its ttl has passed"
        name = (await client.post("/v1/contexts", json=BODY)).json()["id"]
        await _status(client, name, "ready")
        assert engine.gate is not None
        engine.gate.release()
        assert (await _status(client, name, "released"))["error"] == "its KV made way"


async def test_another_key_s_documents_are_not_there(connect: Any) -> None:
    one, two = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
    async with connect(api_key="one,two") as client:
        name = (await client.post("/v1/contexts", json=BODY, headers=one)).json()["id"]
        assert (await client.get(f"/v1/contexts/{name}", headers=two)).status_code == 404
        assert (await client.get("/v1/contexts", headers=two)).json()["data"] == []
        assert (await client.delete(f"/v1/contexts/{name}", headers=two)).status_code == 404
        assert (await client.get(f"/v1/contexts/{name}", headers=one)).status_code == 200


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"messages": None}, "give either 'messages' or 'prompt'"),
        ({"prompt": "x"}, "give either 'messages' or 'prompt'"),
        ({"messages": None, "prompt": ["a", "b"]}, "'prompt' must be one prompt, not 2"),
        ({"ttl": 0}, "'ttl' must be above 0"),
        ({"cache_salt": 3}, "'cache_salt' must be a string, not an integer"),
    ],
)
async def test_bad_bodies_are_refused(connect: Any, change: dict[str, Any], words: str) -> None:
    async with connect() as client:
        answer = await client.post("/v1/contexts", json={**BODY, **change})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(words)


async def test_an_unknown_id_and_a_server_without_a_cache_say_what_to_do(connect: Any, engine: FakeEngine) -> None:
    async with connect() as client:
        missing = await client.get("/v1/contexts/ctx-no")
        engine.info_value = INFO
        refused = await client.post("/v1/contexts", json=BODY)
    assert missing.status_code == 404
    assert missing.json()["error"]["message"] == "no context 'ctx-no' is known: POST /v1/contexts makes one"
    assert "start it with --prefix-cache" in refused.json()["error"]["message"]
