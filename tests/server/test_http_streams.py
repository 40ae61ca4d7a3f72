"""Streams: events, keep-alive, errors, clients that disconnect or do not read, concurrency."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from tests.helpers.asgi_driver import Caller
from tests.helpers.fake_engine import FakeEngine, fail, say
from tests.helpers.polling import eventually, run_ready_tasks

from headway.core.errors import OverloadedError, UnavailableError
from headway.runtime.engine.protocol import OutputDelta

pytestmark = pytest.mark.anyio

PATH = "/v1/completions"
BODY = {"model": "fake-model", "prompt": [2, 3, 4], "max_tokens": 6, "stream": True, "return_token_ids": True}


async def test_events_usage_and_end(application: Any, engine: FakeEngine) -> None:
    async with application() as app:
        call = Caller(app, PATH, {**BODY, "stream_options": {"include_usage": True}})
        await call.done()
    assert call.status == 200
    assert call.ended
    assert call.received.endswith(b"data: [DONE]\n\n")
    *chunks, last = call.events()
    assert [chunk["choices"][0]["token_ids"] for chunk in chunks] == [[2], [3], [4], [2], [3], [4]]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 5 + ["length"]
    assert last["choices"] == []
    details = {"cached_tokens": 0}
    assert last["usage"] == {
        "prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9, "prompt_tokens_details": details
    }  # fmt: skip
    assert not engine.aborted


async def test_usage_is_sent_only_on_request(application: Any) -> None:
    async with application() as app:
        call = Caller(app, PATH, BODY)
        await call.done()
    assert not any("usage" in chunk for chunk in call.events())


async def test_batch_of_prompts_as_choices(application: Any, connect: Any, ids: Callable[[str], list[int]]) -> None:
    async with application() as app:
        call = Caller(app, PATH, {**BODY, "prompt": [[2, 3], [7]], "max_tokens": 3})
        await call.done()
    per_choice: dict[int, list[int]] = {0: [], 1: []}
    for chunk in call.events():
        per_choice[chunk["choices"][0]["index"]] += chunk["choices"][0]["token_ids"]
    assert per_choice == {0: [2, 3, 2], 1: [7, 7, 7]}
    async with connect() as client:
        answer = (await client.post(PATH, json={"model": "fake-model", "prompt": ["hello", "fox"]})).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["usage"]["prompt_tokens"] == len(ids("hello")) + len(ids("fox")) + 2
    assert answer["usage"]["completion_tokens"] == 32


async def test_keep_alive_during_a_long_prefill(application: Any, engine: FakeEngine) -> None:
    engine.hold = asyncio.Event()
    async with application(keep_alive_s=0.01) as app:
        call = Caller(app, PATH, BODY)
        await call.until(b": keep-alive\n\n", 3)
        assert call.status == 200
        assert not call.events()
        engine.hold.set()
        await call.done()
    assert len(call.events()) == 6


@pytest.mark.parametrize(
    ("refusal", "status", "retry"),
    [(OverloadedError("queue full", 2.5), 429, "3"), (UnavailableError("draining", 0.2), 503, "1")],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_refusals_get_their_own_status(
    connect: Any, engine: FakeEngine, refusal: Exception, status: int, retry: str, stream: bool
) -> None:
    engine.refuse = refusal
    async with connect() as client:
        answer = await client.post(PATH, json={**BODY, "stream": stream})
    assert (answer.status_code, answer.headers["retry-after"]) == (status, retry)
    assert answer.json()["error"]["message"] == str(refusal)


FAILURES = [
    (fail("timeout"), 504, None),
    (fail("abort"), 503, None),
    (fail("error", error="worker died"), 500, None),
    (fail("error", error="too long", param="prompt"), 400, "prompt"),
]


@pytest.mark.parametrize(("script", "status", "param"), FAILURES)
@pytest.mark.parametrize("stream", [True, False])
async def test_engine_failures_before_the_first_token(
    connect: Any, engine: FakeEngine, script: Any, status: int, param: str | None, stream: bool
) -> None:
    engine.script = script
    async with connect() as client:
        answer = await client.post(PATH, json={**BODY, "stream": stream})
    assert answer.status_code == status
    assert answer.json()["error"]["param"] == param
    assert answer.json()["error"]["code"] == status


async def test_engine_failure_in_mid_stream(application: Any, engine: FakeEngine) -> None:
    engine.script = fail("timeout", after=[2, 3])
    engine.gate = asyncio.Semaphore(0)
    async with application() as app:
        call = Caller(app, PATH, {**BODY, "timeout_s": 5})
        await call.until(b"data:", 1)
        engine.gate.release()
        engine.gate.release()
        await call.done()
    assert call.status == 200
    assert call.ended
    *_, last = call.events()
    assert last["error"]["code"] == 504
    assert "5 s" in last["error"]["message"]


async def test_an_engine_that_violates_its_protocol_is_a_500(connect: Any, engine: FakeEngine) -> None:
    engine.script = lambda submit, ids: [OutputDelta(id=submit.id, tokens=(2,))]
    async with connect() as client:
        assert (await client.post(PATH, json={**BODY, "stream": False})).status_code == 500
    engine.script = lambda submit, ids: 1 / 0  # type: ignore[assignment]
    async with connect() as client:
        answer = await client.post(PATH, json={**BODY, "stream": False})
    assert answer.status_code == 500
    assert "division" not in answer.text
    assert answer.headers["x-request-id"]


@pytest.mark.parametrize("stream", [True, False])
async def test_client_leaves_during_prefill(application: Any, engine: FakeEngine, stream: bool) -> None:
    engine.hold = asyncio.Event()
    async with application() as app:
        call = Caller(app, PATH, {**BODY, "stream": stream})
        await eventually(lambda: engine.running)
        call.leave()
        await call.done()
        assert engine.aborted == [engine.submits[0].id]
        assert not engine.running
        assert app.state.headway.in_flight == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_client_leaves_during_decode(application: Any, engine: FakeEngine, stream: bool) -> None:
    engine.gate = asyncio.Semaphore(2)
    async with application() as app:
        call = Caller(app, PATH, {**BODY, "stream": stream, "prompt": [[2], [3]]})
        await eventually(lambda: engine.sent >= 3)
        call.leave()
        await call.done()
        assert sorted(engine.aborted) == sorted(submit.id for submit in engine.submits)
        assert len(engine.aborted) == 2


async def test_stop_string_aborts_the_engine(
    application: Any, connect: Any, engine: FakeEngine, ids: Callable[[str], list[int]]
) -> None:
    engine.script = say([token for char in "one STOP two" for token in ids(char)])
    body = {**BODY, "prompt": "x", "max_tokens": 50, "stop": ["STOP"]}
    async with connect() as client:
        choice = (await client.post(PATH, json={**body, "stream": False})).json()["choices"][0]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("one ", "stop", "STOP")
        inclusive = {**body, "stream": False, "include_stop_str_in_output": True}
        assert (await client.post(PATH, json=inclusive)).json()["choices"][0]["text"] == "one STOP"
    async with application() as app:
        call = Caller(app, PATH, body)
        await call.done()
    assert "".join(chunk["choices"][0]["text"] for chunk in call.events()) == "one "
    assert len(engine.aborted) == 3
    assert not engine.finished


async def test_end_token_is_reported(connect: Any, engine: FakeEngine, ids: Callable[[str], list[int]]) -> None:
    engine.script = say(ids("hello"), stop_token=1)
    async with connect() as client:
        choice = (await client.post(PATH, json={**BODY, "stream": False})).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("hello", "stop", 1)
    assert engine.finished
    assert not engine.aborted


async def test_slow_client_is_dropped_and_its_memory_is_bounded(application: Any, engine: FakeEngine) -> None:
    async with application(slow_client_timeout_s=0.15) as app:
        slow = Caller(app, PATH, {**BODY, "max_tokens": 4000})
        await slow.until(b"data:", 1)
        slow.stall()
        sent = engine.sent
        other = Caller(app, PATH, {**BODY, "max_tokens": 50})
        await other.done()
        assert len(other.events()) == 50
        await slow.done()
        assert engine.aborted == [engine.submits[0].id]
        assert engine.sent - sent < 200
        assert not slow.ended


async def test_a_client_that_pauses_loses_nothing(application: Any, engine: FakeEngine) -> None:
    async with application() as app:
        call = Caller(app, PATH, {**BODY, "max_tokens": 300})
        await call.until(b"data:", 1)
        call.stall()
        await run_ready_tasks()
        call._reading.set()
        await call.done()
    assert len(call.events()) == 300
    assert call.ended
    assert not engine.aborted


async def test_concurrent_streams_are_not_mixed_up(application: Any, engine: FakeEngine) -> None:
    async with application() as app:
        calls = [
            Caller(app, PATH, {**BODY, "prompt": [2 + number], "max_tokens": 20 + number}, {"x-request-id": "same"})
            for number in range(40)
        ]
        for call in calls:
            await call.done()
    for number, call in enumerate(calls):
        tokens = [token for chunk in call.events() for token in chunk["choices"][0]["token_ids"]]
        assert tokens == [2 + number] * (20 + number)
    assert len({submit.id for submit in engine.submits}) == 40


async def test_logprobs_in_streams_cover_every_token_once(
    application: Any, engine: FakeEngine, ids: Callable[[str], list[int]]
) -> None:
    engine.script = say([token for char in "a ENDx é" for token in ids(char)], per_delta=2)
    async with application() as app:
        call = Caller(app, PATH, {**BODY, "prompt": "x", "max_tokens": 50, "logprobs": 2, "stop": "END!"})
        await call.done()
    chunks = call.events()
    tokens = [token for chunk in chunks for token in chunk["choices"][0]["logprobs"]["tokens"]]
    offsets = [place for chunk in chunks for place in chunk["choices"][0]["logprobs"]["text_offset"]]
    assert "".join(tokens[:7]) == "a ENDx "
    assert offsets[:7] == [0, 1, 2, 3, 4, 5, 6]
    assert len(tokens) == 9
    assert tokens[7].startswith("bytes:")
