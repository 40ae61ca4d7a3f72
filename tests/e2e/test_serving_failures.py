"""Processes of a server that die under it: its clients see a pause and the same tokens."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from tests.helpers.greedy_reference import GreedyReference
from tests.helpers.http_probe import metric, stream
from tests.helpers.polling import until
from tests.helpers.process_tree import child_pids, ends_soon, engine_pid

from headway.serving.load.convoy import ServerProcess

PROMPT = [3 + (i * i * 31 + i * 17) % 120 for i in range(700)]
COUNT = 300


@pytest.fixture(scope="module")
def wanted(reference: GreedyReference) -> list[int]:
    return reference.tokens(PROMPT, COUNT)


def ids(event: dict) -> list[int]:
    assert "error" not in event, event
    found: list[int] = event["choices"][0]["token_ids"]
    return found


def engine_of(running: ServerProcess) -> int:
    assert running._process is not None
    return engine_pid(running._process.pid)


def workers_of(running: ServerProcess) -> list[int]:
    return [worker for helper in child_pids(engine_of(running)) for worker in child_pids(helper)]


def told_through(running: ServerProcess, harm: object, at: tuple[int, ...]) -> list[int]:
    told: list[int] = []
    left = list(at)
    for event in stream(running.url, PROMPT, COUNT, ignore_eos=True):
        told += ids(event)
        if left and len(told) >= left[0]:
            del left[0]
            harm(len(left))
    assert not left
    return told


@pytest.mark.long
def test_a_stream_goes_on_when_workers_are_killed_and_hang(llama: Path, wanted: list[int]) -> None:
    arguments = [str(llama), "--pipeline-parallel-size", "2", "--worker-timeout", "2"]
    with ServerProcess(arguments) as running:

        def harm(left: int) -> None:
            workers = workers_of(running)
            assert len(workers) == 2
            os.kill(workers[left % 2], signal.SIGKILL if left else signal.SIGSTOP)

        assert told_through(running, harm, (1, 100, 200)) == wanted
        assert metric(running.url, "headway_recoveries_total") == 3
        assert metric(running.url, "headway_lost_tokens_total") >= 700
        health = httpx.get(f"{running.url}/health").json()
        assert health == {"status": "ready", "recoveries": 3, "engine_restarts": 0}
        everybody = [engine_of(running), *workers_of(running)]
    assert all(ends_soon(pid) for pid in everybody)


@pytest.mark.parametrize(
    "layout", [(), pytest.param(("--tensor-parallel-size", "2"), marks=pytest.mark.long)], ids=["one", "T2"]
)
def test_a_stream_goes_on_when_the_engine_is_killed(llama: Path, wanted: list[int], layout: tuple[str, ...]) -> None:
    with ServerProcess([str(llama), *layout]) as running:
        before = [engine_of(running), *workers_of(running)]

        def harm(left: int) -> None:
            for worker in workers_of(running)[:1]:
                os.kill(worker, signal.SIGSTOP)  # it can watch nobody, and must not stay behind
            os.kill(engine_of(running), signal.SIGKILL)

        assert told_through(running, harm, (150,)) == wanted
        assert metric(running.url, "headway_engine_restarts_total") == 1
        assert all(ends_soon(pid) for pid in before)


@pytest.mark.long
def test_a_server_that_is_killed_leaves_its_requests_to_the_next(
    llama: Path, wanted: list[int], tmp_path: Path
) -> None:
    arguments = [str(llama), "--journal", str(tmp_path / "journal")]
    with ServerProcess(arguments) as running:
        body = {
            "model": llama.name, "prompt": PROMPT, "max_tokens": COUNT, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True, "stream": True,
        }  # fmt: skip
        told = 0
        headers = {"x-request-id": "mine"}
        url = f"{running.url}/v1/completions"
        with suppress(httpx.RemoteProtocolError), httpx.stream("POST", url, json=body, headers=headers) as answer:
            for line in answer.iter_lines():
                told += line.startswith("data: ")
                if told == 100:
                    assert running._process is not None
                    engine = engine_of(running)
                    running._process.kill()
                    told += 1
        assert 100 < told < COUNT
        assert ends_soon(engine)
    with ServerProcess(arguments) as running:
        answer = f"{running.url}/v1/requests/mine"  # type: ignore[assignment]
        until(lambda: httpx.get(answer).status_code != 202)
        found = httpx.get(answer)
        assert found.json()["choices"][0]["token_ids"] == wanted
        assert metric(running.url, "headway_decode_tokens_computed_total") < COUNT - 90
