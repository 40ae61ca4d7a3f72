"""/v1/contexts: prepared documents, their states, their end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from tests.helpers.fake_engine import INFO, FakeEngine
from tests.helpers.polling import eventually

from headway.core.errors import OverloadedError
from headway.runtime.engine.protocol import OutputDelta, SubmitRequest
from headway.serving import contexts
from headway.serving.tokenizer import ModelTokenizer

pytestmark = pytest.mark.anyio

BODY = {"model": "fake-model", "messages": [{"role": "user", "content": "a document"}]}


def prepared(submit: SubmitRequest, ids: list[int]) -> Iterable[OutputDelta]:
    yield OutputDelta(id=submit.id, prefilled_tokens=submit.prompt_tokens)
    yield OutputDelta(id=submit.id, finish="abort", error="its KV made way")


@pytest.fixture
def engine() -> FakeEngine:
    # The gate: the engine holds the request after the first delta.
    info = msgspec.structs.replace(INFO, prefix_cache=True, prepares=True)
    return FakeEngine(info_value=info, script=prepared, gate=asyncio.Semaphore(0))


async def _status(client: Any, name: str, wanted: str, computed: int | None = None) -> dict[str, Any]:
    """Wait until a document has this status, and so many of its tokens are computed; return what is shown."""
    for _ in range(1000):
        shown: dict[str, Any] = (await client.get(f"/v1/contexts/{name}")).json()
        if shown["status"] == wanted and computed in (None, shown["computed_tokens"]):
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
        await eventually(lambda: engine.aborted)
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
        engine.info_value = msgspec.structs.replace(INFO, prefix_cache=True)
        unpinned = await client.post("/v1/contexts", json=BODY)
    assert missing.status_code == 404
    assert missing.json()["error"]["message"] == "no context 'ctx-no' is known: POST /v1/contexts makes one"
    assert "start it with --prefix-cache" in refused.json()["error"]["message"]
    assert unpinned.status_code == 400
    assert unpinned.json()["error"]["message"].startswith(
        "a cluster, or a server with --event-log, prepares no documents"
    )


async def test_progress_is_shown(connect: Any, engine: FakeEngine) -> None:
    def slowly(submit: SubmitRequest, ids: list[int]) -> Iterable[OutputDelta]:
        yield OutputDelta(id=submit.id, prefilled_tokens=3)
        yield OutputDelta(id=submit.id, prefilled_tokens=submit.prompt_tokens)
        yield OutputDelta(id=submit.id, finish="abort", error="never reached")

    engine.script = slowly
    assert engine.gate is not None
    async with connect() as client:
        name = (await client.post("/v1/contexts", json=BODY)).json()["id"]
        await _status(client, name, "pending", computed=3)
        engine.gate.release()
        await _status(client, name, "ready")


QUESTION = [{"role": "user", "content": "a question"}]


async def test_a_chat_that_names_a_context_has_its_messages_first(connect: Any, engine: FakeEngine) -> None:
    async with connect() as client:
        name = (await client.post("/v1/contexts", json={**BODY, "cache_salt": "mine"})).json()["id"]
        engine.script, engine.gate = None, None
        chat = {"model": "fake-model", "max_tokens": 1}
        for path, fields in (("chat/completions", {"messages": QUESTION}), ("responses", {"input": "a question"})):
            sent = {key: value for key, value in chat.items() if path != "responses" or key == "model"}
            answer = await client.post(f"/v1/{path}", json={**sent, **fields, "context_id": name})
            assert answer.status_code == 200, answer.text
        whole = {**chat, "messages": [*BODY["messages"], *QUESTION], "cache_salt": "mine"}
        await client.post("/v1/chat/completions", json=whole)
    _, named, response, written = engine.prompts
    assert named == response == written
    assert len({submit.cache_salt for submit in engine.submits}) == 1


@pytest.mark.parametrize(
    ("first", "rest", "whole"), [("a text", " goes on", "a text goes on"), ([5, 6], [7], [5, 6, 7])]
)
async def test_a_completion_that_names_a_context_continues_it(
    connect: Any, engine: FakeEngine, first: Any, rest: Any, whole: Any
) -> None:
    async with connect() as client:
        made = await client.post("/v1/contexts", json={"model": "fake-model", "prompt": first})
        engine.script, engine.gate = None, None
        body = {"model": "fake-model", "max_tokens": 1}
        await client.post("/v1/completions", json={**body, "prompt": rest, "context_id": made.json()["id"]})
        await client.post("/v1/completions", json={**body, "prompt": whole})
    assert engine.prompts[1] == engine.prompts[2]


@pytest.mark.parametrize(
    ("path", "document", "change", "status", "words"),
    [
        ("chat/completions", BODY, {"context_id": "ctx-no"}, 404, "no context 'ctx-no' is known: POST /v1/contexts"),
        ("chat/completions", BODY, {"context_id": 3}, 400, "'context_id' must be a string, not an integer"),
        ("chat/completions", BODY, {"cache_salt": "other"}, 400, "'cache_salt' is not that of the context"),
        ("chat/completions", {"model": "fake-model", "prompt": "x"}, {}, 400, "the context "),
        ("completions", BODY, {"prompt": "x"}, 400, "the context "),
        ("completions", {"model": "fake-model", "prompt": "x"}, {"prompt": [1]}, 400, "'prompt' must be text, as"),
        ("completions", {"model": "fake-model", "prompt": [1]}, {"prompt": "x"}, 400, "'prompt' must be an array of"),
        ("completions", {"model": "fake-model", "prompt": "x"}, {"prompt": ["a"]}, 400, "'prompt' must be text, as"),
    ],
)
async def test_what_does_not_fit_a_context_is_refused(
    connect: Any, path: str, document: dict[str, Any], change: dict[str, Any], status: int, words: str
) -> None:
    async with connect() as client:
        name = (await client.post("/v1/contexts", json=document)).json()["id"]
        fields = {"messages": QUESTION} if path == "chat/completions" else {}
        answer = await client.post(f"/v1/{path}", json={"model": "fake-model", **fields, "context_id": name, **change})
    assert answer.status_code == status
    assert answer.json()["error"]["message"].startswith(words)


async def test_a_context_of_another_key_cannot_be_named(connect: Any) -> None:
    one, two = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
    async with connect(api_key="one,two") as client:
        name = (await client.post("/v1/contexts", json=BODY, headers=one)).json()["id"]
        named = {"model": "fake-model", "messages": QUESTION, "context_id": name}
        answer = await client.post("/v1/chat/completions", json=named, headers=two)
    assert answer.status_code == 404


@pytest.mark.parametrize("field", ["context_id", "context\\u005fid"])
async def test_a_document_is_not_tokenised_on_the_event_loop(
    connect: Any, engine: FakeEngine, tokenizer: ModelTokenizer, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    threads, encode = [], ModelTokenizer.encode_long

    def noted(self: ModelTokenizer, text: str, **more: Any) -> Any:
        threads.append(threading.current_thread())
        return encode(self, text, **more)

    async with connect() as client:
        name = (await client.post("/v1/contexts", json=BODY)).json()["id"]
        engine.script, engine.gate = None, None
        monkeypatch.setattr(ModelTokenizer, "encode_long", noted)
        for more in (f', "{field}": "{name}"', ""):
            body = f'{{"model": "fake-model", "max_tokens": 1, "messages": [{{"role": "user", "content": "q"}}]{more}}}'
            answer = await client.post("/v1/chat/completions", content=body)
            assert answer.status_code == 200, answer.text
    document, short = threads
    assert document is not threading.current_thread()
    assert short is threading.current_thread()


async def test_documents_wait_in_a_queue_of_their_own(connect: Any, engine: FakeEngine) -> None:
    engine.hold, engine.gate = asyncio.Event(), None
    async with connect() as client:
        made = [(await client.post("/v1/contexts", json=BODY)).json()["id"] for _ in range(12)]
        await eventually(lambda: len(engine.running) == 4)
        # The engine's queue is the chats': few documents are in it.
        assert len(engine.submits) == len(engine.running) == 4
        engine.gate = asyncio.Semaphore(0)
        engine.hold.set()
        for name in made:
            await _status(client, name, "ready")
        assert len(engine.submits) == 12


async def test_a_document_that_a_full_queue_refuses_is_prepared_later(connect: Any, engine: FakeEngine) -> None:
    engine.refuse = OverloadedError("the queue is full", 0.01)
    async with connect() as client:
        name = (await client.post("/v1/contexts", json=BODY)).json()["id"]
        await asyncio.sleep(0.03)
        assert (await client.get(f"/v1/contexts/{name}")).json()["status"] == "pending"
        engine.refuse = None
        await _status(client, name, "ready")


async def test_more_documents_than_can_be_prepared_soon_are_refused(
    connect: Any, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contexts, "_MOST_PENDING", 4)
    engine.hold = asyncio.Event()
    one, two = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
    async with connect(api_key="one,two") as client:
        for headers, status in ((one, 201), (one, 201), (one, 429), (two, 201), (two, 201), (two, 429)):
            assert (await client.post("/v1/contexts", json=BODY, headers=headers)).status_code == status
