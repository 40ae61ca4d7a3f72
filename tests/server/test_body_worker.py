"""Large bodies are read by processes of their own: the same answers, whatever becomes of a process, within bounds."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.polling import until
from tests.server import body_work

from headway.core.errors import RequestError, UnavailableError
from headway.runtime import embedded
from headway.serving import body_worker
from headway.serving.body_worker import BodyWorkers, MemoryFile
from headway.serving.load.convoy import ServerProcess
from headway.serving.tokenizer import ModelTokenizer

pytestmark = pytest.mark.anyio

TOKENIZER = ModelTokenizer.load(Path(embedded.__file__).parent)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be impatient."""
    monkeypatch.setattr(body_worker, "SILENCE_S", 4)


@contextmanager
def started() -> Iterator[BodyWorkers]:
    made = BodyWorkers(TOKENIZER, 1 << 30)
    yield made
    made.close()


@pytest.fixture(scope="module")
def workers() -> Iterator[BodyWorkers]:
    with started() as made:
        yield made


def body(size: int = 10) -> MemoryFile:
    file = MemoryFile()
    os.truncate(file.descriptor, size)
    return file


def gone(number: int) -> bool:
    """Whether the process has ended; one that waits to be reaped has."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


async def test_medium_and_large_bodies_have_a_process_each(workers: BodyWorkers) -> None:
    found = [await workers.run(body(size), size, body_work.size) for size in (10, 2 << 20, 20, 3 << 20)]
    assert [size for _, size in found] == [10, 2 << 20, 20, 3 << 20]
    assert found[0][0] == found[2][0] != found[1][0] == found[3][0]


async def test_errors_of_the_work_are_raised_here_and_the_process_goes_on(workers: BodyWorkers) -> None:
    number, _ = await workers.run(body(), 10, body_work.size)
    with pytest.raises(RequestError, match="it is refused") as caught:
        await workers.run(body(), 10, body_work.refuse)
    assert caught.value.param == "prompt"
    with pytest.raises(UnavailableError, match="more memory than this server allows"):
        await workers.run(body(), 10, body_work.take_too_much)
    assert (await workers.run(body(), 10, body_work.size))[0] == number


@pytest.mark.parametrize("way", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_body_whose_process_is_killed_or_stopped_goes_to_another(
    workers: BodyWorkers, tmp_path: Path, way: signal.Signals
) -> None:
    seen = tmp_path / "seen"
    assert await workers.run(body(), 10, body_work.once, str(seen), int(way)) == "answered"
    until(lambda: gone(int(seen.read_text())), 10.0)


@pytest.mark.parametrize("way", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_process_that_is_killed_or_stopped_between_bodies_is_replaced(
    workers: BodyWorkers, way: signal.Signals
) -> None:
    number, _ = await workers.run(body(), 10, body_work.size)
    os.kill(number, way)
    assert (await workers.run(body(), 10, body_work.size))[0] != number
    assert gone(number)


async def test_only_the_body_that_ends_processes_is_refused(workers: BodyWorkers) -> None:
    asked = [workers.run(body(), 10, work) for work in (body_work.size, body_work.die, body_work.size, body_work.size)]
    found = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(found[1], UnavailableError)
    assert "two processes that read large bodies have failed with this one" in str(found[1])
    assert [isinstance(each, tuple) for each in found] == [True, False, True, True]


async def test_a_body_that_takes_too_long_is_refused_and_a_slow_one_is_not(
    workers: BodyWorkers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Longer than a silence: the process says that it lives.
    assert await workers.run(body(), 10, body_work.slow, 6.0) == 10
    module = tmp_path / "impatient_worker.py"
    lines = ("from headway.serving import body_worker", "body_worker._CPU_S_PER_BYTE = -1.999", "body_worker.main()")
    module.write_text("\n".join(lines))
    with started() as impatient:
        for worker in impatient._workers:
            worker.command = [*worker.command[:2], str(module)]
        with pytest.raises(UnavailableError, match="two processes"):
            await impatient.run(body(), 10, body_work.hang, str(tmp_path / "seen"))
    numbers = (tmp_path / "seen").read_text().split()
    assert len(set(numbers)) == 2
    until(lambda: all(gone(int(number)) for number in numbers), 10.0)


async def test_memory_that_a_body_took_comes_back(workers: BodyWorkers) -> None:
    number = await workers.run(body(), 10, body_work.take, 200 << 20)
    until(lambda: gone(number), 10.0)
    assert (await workers.run(body(), 10, body_work.size))[0] != number


async def test_bodies_are_refused_once_the_server_ends() -> None:
    with started() as workers:
        number, _ = await workers.run(body(), 10, body_work.size)
        under_way = asyncio.ensure_future(workers.run(body(), 10, body_work.slow, 60.0))
        await asyncio.sleep(0.2)
    with pytest.raises(UnavailableError, match="the server is ending"):
        await under_way
    assert gone(number)


async def test_a_process_imports_little_and_nothing_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("random", "queue", "socket", "pickle", "struct", "json", "typing", "tokenizers"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('shadowed')")
    monkeypatch.chdir(tmp_path)
    with started() as workers:
        found = await workers.run(body(), 10, body_work.modules)
    assert "tokenizers" in found
    assert not {"torch", "numpy", "fastapi", "headway.serving.app"} & set(found)


async def test_a_large_body_is_answered_like_a_small_one(connect: Any, engine: Any) -> None:
    from headway.runtime.engine.protocol import EngineInfo

    info: EngineInfo = engine.info_value
    assert info.max_model_len < 70_000
    async with connect() as client:
        for padding in (10, 70_000):
            base = {"model": "fake-model", "max_tokens": 2, "user": "x"}
            chat = {**base, "messages": [{"role": "user", "content": "hi"}]}
            for path, fields in (
                ("/v1/completions", {**base, "prompt": "hello"}),
                ("/v1/chat/completions", chat),
                ("/v1/responses", {"model": "fake-model", "input": "hello", "max_output_tokens": 2}),
                ("/tokenize", {"prompt": "hello world"}),
                ("/detokenize", {"tokens": [5, 6]}),
            ):
                content = json.dumps(fields) + " " * padding
                answer = await client.post(path, content=content)
                assert answer.status_code == 200, (path, padding, answer.text)
            wrong = await client.post("/v1/completions", content=json.dumps({**base, "prompt": 3}) + " " * padding)
            assert wrong.json()["error"]["param"] == "prompt"
    assert engine.prompts[:3] == engine.prompts[3:]


@pytest.fixture(scope="module")
def pieces() -> dict[str, bytes]:
    """Bodies whose decoded form is many times their size."""
    many = 200_000
    return {
        "keys": b'{"model":"m","x":{%b}}' % b",".join(b'"k%d":1' % number for number in range(many)),
        "lists": b'{"model":"m","prompt":[%b]}' % b",".join([b"[]"] * many),
        "objects": b'{"model":"m","messages":[%b]}' % b",".join([b"{}"] * 600_000),
        "stops": b'{"model":"m","stop":[%b]}' % b",".join([b'"abcd"'] * many),
        "biases": b'{"model":"m","logit_bias":{%b}}' % b",".join(b'"%d":1' % number for number in range(many)),
        "user": b'{"model":"m","user":"%b"}' % (b"x" * (2 << 20)),
        "top level": b"{%b}" % b",".join(b'"k%d":[]' % number for number in range(many)),
        "escaped names": b'{"model":"m","prom\\u0070t":[%b]}' % b",".join([b"1.5"] * 600_000),
        "open text": b'{"model":"m","prompt":"' + b'\\"' * 600_000,
        "white": b'{"model":"m",' + b" " * (2 << 20) + b'"prompt":"x"}',
    }


async def test_a_body_of_much_structure_is_refused_in_a_sentence(connect: Any, pieces: dict[str, bytes]) -> None:
    async with connect() as client:
        for name, content in pieces.items():
            answer = await client.post("/v1/completions", content=content)
            assert answer.status_code == 400
            message = answer.json()["error"]["message"]
            assert ("not valid JSON" if name == "open text" else "besides long texts and token ids") in message, name
            assert len(message) < 300


async def test_no_more_ids_are_turned_into_text_than_a_context_holds(connect: Any, engine: Any) -> None:
    most = engine.info_value.max_model_len
    async with connect() as client:
        assert (await client.post("/detokenize", json={"tokens": [5] * most})).status_code == 200
        for count in (most + 1, 100 * most):
            answer = await client.post("/detokenize", json={"tokens": [5] * count})
            assert answer.status_code == 400
            assert "'tokens' holds" in answer.json()["error"]["message"]


@pytest.mark.long
@pytest.mark.parametrize("way", [ServerProcess.kill, ServerProcess.stop])
def test_nothing_is_left_of_a_server_that_is_killed_or_ends(way: Any) -> None:
    text = "a quick fox " * 20_000
    with ServerProcess(()) as server:
        asked = urllib.request.Request(f"{server.url}/tokenize", json.dumps({"prompt": text}).encode())
        with urllib.request.urlopen(asked, timeout=60) as answer:
            assert json.load(answer)["tokens"] == TOKENIZER.encode(text, add_special_tokens=True)
        children = "".join(each.read_text() for each in Path(f"/proc/{server.pid}/task").glob("*/children"))
        (number,) = {
            int(each) for each in children.split()
            if b"headway.serving.body_worker" in Path(f"/proc/{each}/cmdline").read_bytes()
        }  # fmt: skip
        assert not gone(number)
        way(server)
        until(lambda: gone(number), 30.0)
