"""Recovery of unfinished requests by the next server with the same journal."""

from __future__ import annotations

import asyncio
import json
import tempfile
from array import array
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.asgi_driver import Caller
from tests.helpers.fake_engine import FakeEngine, echo, fail
from tests.helpers.polling import eventually, run_ready_tasks

from headway.core.errors import ConfigError, OverloadedError, UnavailableError
from headway.runtime.engine.protocol import OutputDelta
from headway.serving.app import create_app
from headway.serving.journal import RequestJournal
from headway.serving.settings import ServerSettings
from headway.serving.tokenizer import ModelTokenizer

pytestmark = pytest.mark.anyio

PATH = "/v1/completions"
BODY = {"model": "fake-model", "prompt": [5, 6, 7], "max_tokens": 6, "return_token_ids": True}
WANTED = [5, 6, 7, 5, 6, 7]


def left(folder: Path) -> dict[str, list[int]]:
    journal = RequestJournal(folder)
    journal.close()
    return {
        e.accepted.id: [t for said in e.outputs for d in said for t in d.tokens] for e in journal.unfinished.values()
    }


async def interrupted(connect: Any, engine: FakeEngine, folder: Path, tokens: int, **body: Any) -> None:
    """Serve one request until `tokens` tokens were emitted, then stop the server as a crash would, without shutdown."""
    engine.gate = asyncio.Semaphore(tokens - 1 if tokens else 0)
    engine.hold = None if tokens else asyncio.Event()
    async with connect(journal=str(folder)) as client:
        headers = {"x-request-id": "mine"}
        sent = asyncio.create_task(client.post(PATH, json={**BODY, **body}, headers=headers))
        await eventually(lambda: engine.sent >= tokens and engine.submits)
        await run_ready_tasks()
        server = client._transport.app.state.headway
        # Closed before the cancellation, as after a crash nothing more is recorded.
        server.close_journal()
        sent.cancel()
        await asyncio.gather(sent, return_exceptions=True)
    # Reset the fake engine for the next server.
    engine.sent, engine.gate, engine.hold, engine.submits = 0, None, None, []
    engine.state = "starting"


def continuing(engine: FakeEngine) -> None:
    """Make the engine continue after the output that a submitted request contains."""

    def script(submit: Any, ids: list[int]) -> Any:
        return list(echo(submit, ids))[len(submit.output) :]

    engine.script = script


@pytest.mark.parametrize("tokens", [0, 1, 4])
async def test_the_next_server_finishes_a_request_and_keeps_the_answer(
    connect: Any, engine: FakeEngine, tmp_path: Path, tokens: int
) -> None:
    await interrupted(connect, engine, tmp_path, tokens, temperature=0.5, priority=3, timeout_s=50)
    assert left(tmp_path) == {"mine": WANTED[:tokens]}
    continuing(engine)
    async with connect(journal=str(tmp_path)) as client:
        await eventually(lambda: engine.finished)
        (submit,) = engine.submits
        assert submit.resubmitted
        assert list(submit.output) == WANTED[:tokens]
        assert (submit.params.temperature, submit.priority) == (0.5, 3)
        await run_ready_tasks()
        answer = await client.get("/v1/requests/mine")
        assert answer.status_code == 200
        whole = answer.json()
        assert (whole["object"], whole["id"]) == ("text_completion", "cmpl-mine")
        assert whole["choices"][0]["token_ids"] == WANTED
        assert whole["choices"][0]["finish_reason"] == "length"
        assert whole["usage"]["completion_tokens"] == 6
        stream = (await client.get("/v1/requests/mine?stream=true")).text
        events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
        assert [t for one in events for t in one["choices"][0]["token_ids"]] == WANTED
        assert stream.endswith("data: [DONE]\n\n")
        assert (await client.get("/v1/requests/other")).status_code == 404
    assert left(tmp_path) == {"mine": WANTED}
    async with connect(journal=str(tmp_path)) as client:  # another restart: nothing is computed again
        await run_ready_tasks()
        assert (await client.get("/v1/requests/mine")).json()["choices"] == whole["choices"]
        assert len(engine.submits) == 1
        assert (await client.delete("/v1/requests/mine")).json()["status"] == "deleted"
        assert (await client.get("/v1/requests/mine")).status_code == 404
    assert left(tmp_path) == {}


async def test_a_running_recovered_request_answers_202_and_can_be_streamed(
    connect: Any, engine: FakeEngine, tmp_path: Path
) -> None:
    await interrupted(connect, engine, tmp_path, 2)
    continuing(engine)
    engine.gate = asyncio.Semaphore(0)
    async with connect(journal=str(tmp_path)) as client:
        await eventually(lambda: engine.sent == 1)
        await run_ready_tasks()
        answer = await client.get("/v1/requests/mine")
        assert answer.status_code == 202
        assert answer.json() == {"object": "request", "status": "running", "output_tokens": 3}
        following = asyncio.create_task(client.get("/v1/requests/mine?stream=true"))
        await run_ready_tasks()
        for _ in range(5):
            engine.gate.release()
        text = (await following).text
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        assert [t for one in events for t in one["choices"][0]["token_ids"]] == WANTED


async def test_stop_strings_logprobs_and_batches_survive_a_restart(
    connect: Any, engine: FakeEngine, tmp_path: Path, ids: Callable[[str], list[int]], tokenizer: ModelTokenizer
) -> None:
    await interrupted(
        connect, engine, tmp_path, 2, prompt=[ids("xyz"), ids("abc")], max_tokens=9, stop=["by"], logprobs=1
    )
    continuing(engine)
    async with connect(journal=str(tmp_path)) as client:
        plain = {"model": "fake-model", "prompt": [ids("xyz"), ids("abc")], "max_tokens": 9, "stop": ["by"]}
        wanted = (await client.post(PATH, json={**plain, "logprobs": 1, "return_token_ids": True})).json()
        await eventually(lambda: len(engine.submits) >= 4 and not engine.running)
        await run_ready_tasks()
        found = (await client.get("/v1/requests/mine")).json()
        assert found["choices"] == wanted["choices"]


async def test_answered_abandoned_and_refused_requests_leave_nothing_in_the_journal(
    connect: Any, engine: FakeEngine, tmp_path: Path
) -> None:
    async with connect(journal=str(tmp_path)) as client:
        assert (await client.post(PATH, json=BODY)).status_code == 200
        text = (await client.post(PATH, json={**BODY, "stream": True})).text
        assert text.endswith("data: [DONE]\n\n")
        assert (await client.post(PATH, json={**BODY, "max_tokens": 0})).status_code == 400
        engine.script = fail("timeout", after=[5])
        assert (await client.post(PATH, json=BODY)).status_code == 504
        engine.refuse = OverloadedError("full")
        assert (await client.post(PATH, json=BODY)).status_code == 429
        assert client._transport.app.state.headway.in_flight == 0
    assert left(tmp_path) == {}


async def test_answers_are_kept_for_the_configured_time(connect: Any, engine: FakeEngine, tmp_path: Path) -> None:
    await interrupted(connect, engine, tmp_path, 2)
    continuing(engine)
    async with connect(journal=str(tmp_path), journal_keep_s=0.05) as client:
        await eventually(lambda: engine.finished)
        await eventually(lambda: not client._transport.app.state.headway.recovered)
        assert (await client.get("/v1/requests/mine")).status_code == 404
    assert left(tmp_path) == {}


async def test_requests_with_one_id_are_all_kept(connect: Any, engine: FakeEngine, tmp_path: Path) -> None:
    await interrupted(connect, engine, tmp_path, 2)
    journal = RequestJournal(tmp_path)
    (older,) = journal.unfinished.values()
    assert older.accepted.key.startswith("hw-")
    for number, prompt in enumerate(([8, 9], [7, 7])):
        journal.accept("mine", older.accepted.job, [array("i", prompt).tobytes()], key=f"hw-{number}")
    journal.close()
    continuing(engine)
    async with connect(journal=str(tmp_path)) as client:
        await eventually(lambda: len(engine.finished) == 3)
        await run_ready_tasks()
        several = await client.get("/v1/requests/mine")
        assert several.status_code == 409
        keys = (older.accepted.key, "hw-0", "hw-1")
        assert all(key in several.json()["error"]["message"] for key in keys)
        assert (await client.delete("/v1/requests/mine")).status_code == 409
        for key, wanted in zip(keys, (WANTED, [8, 9, 8, 9, 8, 9], [7, 7, 7, 7, 7, 7]), strict=True):
            found = (await client.get(f"/v1/requests/{key}")).json()
            assert found["choices"][0]["token_ids"] == wanted
        assert (await client.delete("/v1/requests/hw-0")).status_code == 200
        assert (await client.get("/v1/requests/hw-1")).status_code == 200
        assert (await client.get("/v1/requests/hw-0")).status_code == 404


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["ask", "ask", "ask", "finish", "leave", "restart"]),
            st.sampled_from(["a", "b"]),  # the client's id
            st.sampled_from(["one", "two"]),  # its key
        ),
        min_size=2,
        max_size=12,
    )
)
def test_no_history_of_equal_ids_loses_doubles_or_mixes_answers(steps: list[tuple[str, str, str]]) -> None:
    """What was accepted and neither answered nor left is there after any restart, once, and its owner's alone."""
    with tempfile.TemporaryDirectory() as name:
        journal = RequestJournal(Path(name))
        alive: dict[str, tuple[int, str, str]] = {}
        count = 0
        for verb, label, owner in steps:
            if verb == "ask":
                count += 1
                number = journal.accept(label, b"", [array("i", [count]).tobytes()], owner, f"hw-{count}")
                journal.write_output(number, 0, OutputDelta(id="x", tokens=(count,)))
                alive[f"hw-{count}"] = (number, label, owner)
            elif verb == "restart":
                journal.close()
                journal = RequestJournal(Path(name))
                alive = {e.accepted.key: (n, e.accepted.id, e.accepted.owner) for n, e in journal.unfinished.items()}
            elif alive and (key := next((k for k, each in alive.items() if each[1:] == (label, owner)), None)):
                journal.end(alive.pop(key)[0])
        expected = {key: (label, owner) for key, (_, label, owner) in alive.items()}
        journal.close()
        journal = RequestJournal(Path(name))
        found = {e.accepted.key: (e.accepted.id, e.accepted.owner) for e in journal.unfinished.values()}
        assert found == expected
        for entry in journal.unfinished.values():
            token = int(entry.accepted.key.removeprefix("hw-"))
            assert [delta.tokens for delta in entry.outputs[0]] == [(token,)]
        journal.close()


async def test_a_client_that_follows_a_stream_gets_an_error_when_the_request_is_deleted(
    connect: Any, engine: FakeEngine, tmp_path: Path
) -> None:
    await interrupted(connect, engine, tmp_path, 2)
    continuing(engine)
    engine.gate = asyncio.Semaphore(0)
    async with connect(journal=str(tmp_path)) as client:
        await eventually(lambda: engine.sent == 1)
        server = client._transport.app.state.headway
        following = asyncio.create_task(client.get("/v1/requests/mine?stream=true"))
        # Its stream may begin late on a busy machine, and so may the third token.
        recovered = next(iter(server.recovered.values()))
        await eventually(lambda: server.active._tasks and [one.tokens for one in recovered.answers] == [WANTED[:3]])
        await run_ready_tasks()
        assert (await client.delete("/v1/requests/mine")).json()["status"] == "deleted"
        async with asyncio.timeout(5):
            events = [json.loads(line[6:]) for line in (await following).text.splitlines() if line.startswith("data: ")]
        assert [t for one in events[:-1] for t in one["choices"][0]["token_ids"]] == WANTED[:3]
        assert (events[-1]["error"]["code"], events[-1]["error"]["message"]) == (404, "the request was deleted")
        await eventually(lambda: engine.aborted and not server.in_flight)
    assert left(tmp_path) == {}


def giving_up(engine: FakeEngine, after: int) -> None:
    """Make the engine fail once a request has had `after` more tokens."""

    def script(submit: Any, ids: list[int]) -> Iterable[Any]:
        yield from list(echo(submit, ids))[len(submit.output) :][:after]
        engine.state = "lost"
        raise UnavailableError("the engine is gone")

    engine.script = script


@pytest.mark.parametrize("forgotten", [False, True])
async def test_a_recovered_request_that_is_interrupted_again_is_left_to_the_next_server(
    connect: Any, engine: FakeEngine, tmp_path: Path, forgotten: bool
) -> None:
    await interrupted(connect, engine, tmp_path, 2)
    giving_up(engine, after=1)
    async with connect(journal=str(tmp_path), journal_keep_s=0.01) as client:
        await eventually(lambda: engine.state == "lost")
        await run_ready_tasks()
        assert (await client.get("/v1/requests/mine")).status_code == 503
        if forgotten:
            assert (await client.delete("/v1/requests/mine")).status_code == 200
    assert left(tmp_path) == ({} if forgotten else {"mine": WANTED[:3]})


async def test_an_answer_that_is_given_up_halfway_is_left_to_the_next_server(
    connect: Any, engine: FakeEngine, tmp_path: Path
) -> None:
    giving_up(engine, after=2)
    async with connect(journal=str(tmp_path)) as client:
        assert (await client.post(PATH, json=BODY, headers={"x-request-id": "mine"})).status_code == 503
    assert left(tmp_path) == {"mine": WANTED[:2]}


async def test_an_answer_that_is_sent_after_the_drained_engine_ended_is_not_left(
    application: Any, engine: FakeEngine, tmp_path: Path
) -> None:
    engine.gate = asyncio.Semaphore(len(WANTED) - 2)
    async with application(journal=str(tmp_path)) as app:
        caller = Caller(app, PATH, {**BODY, "stream": True})
        await caller.until(b"data:", 5)
        caller.stall()
        engine.gate.release()
        # The last token waits for its client.
        await eventually(lambda: engine.sent == len(WANTED))
        await run_ready_tasks()
        engine.state = "lost"
        assert app.state.headway.in_flight == 1
        caller.resume()
        await caller.done()
        assert caller.received.endswith(b"data: [DONE]\n\n")
    assert left(tmp_path) == {}


async def test_without_a_journal_there_is_no_such_request(connect: Any) -> None:
    async with connect() as client:
        assert (await client.get("/v1/requests/mine")).status_code == 404


def test_a_journal_that_another_server_holds_is_refused(
    engine: FakeEngine, tokenizer: ModelTokenizer, tmp_path: Path
) -> None:
    held = RequestJournal(tmp_path)
    with pytest.raises(ConfigError, match="another server writes to it"):
        create_app(engine, tokenizer, ServerSettings(journal=str(tmp_path)))
    held.close()
