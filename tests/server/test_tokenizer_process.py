"""Long texts are encoded by a process of their own: the same ids and refusals, whatever becomes of the process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.helpers.polling import let_arrive, until

from headway.core.errors import RequestError, UnavailableError
from headway.runtime import embedded
from headway.serving.launch import load_tokenizer
from headway.serving.load.server_process import ServerProcess
from headway.serving.prompts import PromptReader
from headway.serving.settings import ServerSettings
from headway.serving.tokenizer import ModelTokenizer
from headway.serving.tokenizer_process import QUESTION, TokenizerProcess, _ids, received
from headway.serving.tokenizing_memory import BYTES_PER_CHARACTER

EMBEDDED = Path(embedded.__file__).parent
MEMORY = 1 << 30
HERE = ModelTokenizer.load(EMBEDDED)
TEXTS = {
    "one letter": "a" * 100_000,
    "letters": "".join(chr(97 + at * at % 26) for at in range(100_000)),
    "hex": "9f3b" * 25_000,
    "prose": "The quick brown fox's 12 jobs; привет, 漢字。\n" * 2500,
    "short": "a quick fox",
}


@pytest.fixture(scope="module")
def shared() -> Iterator[TokenizerProcess]:
    """A process of the embedded model's tokenizer, for tests that leave it alive."""
    process = TokenizerProcess(EMBEDDED, MEMORY)
    yield process
    process.close()


@pytest.fixture
def own() -> Iterator[TokenizerProcess]:
    """A process of one test, started with a short text."""
    process = TokenizerProcess(EMBEDDED, MEMORY)
    process.encode("a", add_special_tokens=False)
    yield process
    process.close()


def pid(process: TokenizerProcess) -> int:
    assert process._running is not None
    return process._running[0].pid


def gone(number: int) -> bool:
    """Whether the process has ended; one that waits to be reaped has."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("special", [True, False])
def test_the_ids_are_those_of_this_process(shared: TokenizerProcess, name: str, special: bool) -> None:
    text = TEXTS[name]
    expected = HERE.encode_long(text, add_special_tokens=special)
    assert shared.encode(text, add_special_tokens=special) == expected


def test_several_threads_each_get_their_own_ids(shared: TokenizerProcess) -> None:
    texts = [f"{number} quick foxes, " * 3000 for number in range(12)]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda text: shared.encode(text, add_special_tokens=False), texts))
    assert found == [HERE.encode_long(text, add_special_tokens=False) for text in texts]


@pytest.mark.parametrize("text", ["a" * 66_000, "some words, " * 25_000], ids=["uncut", "long"])
def test_a_server_sends_texts_there_that_would_hold_the_lock_or_a_core(text: str) -> None:
    tokenizer = load_tokenizer(str(EMBEDDED), ServerSettings())
    assert tokenizer._process is not None
    tokenizer.encode("some words, " * 8000, add_special_tokens=False)
    assert tokenizer._process._running is None
    assert tokenizer.encode(text, add_special_tokens=True) == HERE.encode(text, add_special_tokens=True)
    number = pid(tokenizer._process)
    tokenizer.close()
    assert gone(number)
    with pytest.raises(UnavailableError, match="server is ending"):
        tokenizer.encode(text, add_special_tokens=False)


def test_many_texts_of_one_request_go_there_together(own: TokenizerProcess) -> None:
    reader, seen = PromptReader(ModelTokenizer(HERE._backend, process=own), 1 << 20, 64), [0]
    text, encode = "some words, " * 900, own.encode

    def counted(text: str, **more: Any) -> Any:
        seen[0] += 1
        return encode(text, **more)

    own.encode = counted  # type: ignore[method-assign]
    for count, there in ((10, 0), (30, 30)):
        prompts = reader.read(msgspec.Raw(json.dumps([text] * count)), add_special_tokens=True)
        assert {prompt.data.tobytes() for prompt in prompts} == {
            HERE.encode_long(text, add_special_tokens=True).tobytes()
        }
        assert seen[0] == there


def test_without_a_server_no_process_is_started() -> None:
    assert HERE._process is None


def refusal(encode: Any, text: str, **more: Any) -> tuple[str, str | None]:
    with pytest.raises(RequestError) as caught:
        encode(text, add_special_tokens=False, **more)
    return str(caught.value), caught.value.param


def test_refusals_are_those_of_this_process() -> None:
    limit = 70_000 * BYTES_PER_CHARACTER
    process, here = TokenizerProcess(EMBEDDED, limit), ModelTokenizer.load(EMBEDDED, memory=limit)
    try:
        said = refusal(process.encode, "a" * 70_001)
        assert said == refusal(here.encode_long, "a" * 70_001)
        assert "allows 70000" in said[0]
        said = refusal(process.encode, TEXTS["prose"], most_tokens=1000)
        assert said == refusal(here.encode_long, TEXTS["prose"], most_tokens=1000)
        assert "maximum context length is 1000 tokens" in said[0]
    finally:
        process.close()


def test_what_cannot_be_tokenised_is_an_error_and_the_process_goes_on(own: TokenizerProcess) -> None:
    number = pid(own)
    _, channel = own._channel()
    with channel:
        channel.sendall(QUESTION.pack(False, -1) + b"\xff")
        channel.shutdown(1)
        with pytest.raises(RuntimeError, match="could not be tokenised: UnicodeDecodeError"):
            _ids(received(channel))
    assert own.encode("a", add_special_tokens=False)
    assert pid(own) == number


def test_a_client_of_the_process_that_leaves_costs_nothing(own: TokenizerProcess) -> None:
    number = pid(own)
    for sent in (b"", QUESTION.pack(False, -1) + b"a" * 100_000):
        _, channel = own._channel()
        channel.sendall(sent)
        channel.close()
    assert own.encode(TEXTS["hex"], add_special_tokens=False) == HERE.encode_long(
        TEXTS["hex"], add_special_tokens=False
    )
    assert pid(own) == number


@pytest.mark.parametrize("sends_first", [True, False])
def test_a_text_whose_process_dies_goes_to_another(own: TokenizerProcess, sends_first: bool) -> None:
    first, text = pid(own), TEXTS["one letter"]
    os.kill(first, signal.SIGSTOP if sends_first else signal.SIGKILL)
    with ThreadPoolExecutor(2) as threads:
        answers = [threads.submit(own.encode, text, add_special_tokens=False) for _ in range(2)]
        if sends_first:
            let_arrive()
            os.kill(first, signal.SIGKILL)
        for answer in answers:
            assert answer.result() == HERE.encode_long(text, add_special_tokens=False)
    assert pid(own) != first


@pytest.mark.anyio
async def test_a_text_whose_process_dies_twice_is_refused(connect: Any) -> None:
    process = TokenizerProcess(EMBEDDED, MEMORY)
    process._command = [sys.executable, "-c", "pass"]
    tokenizer = ModelTokenizer(HERE._backend, process=process)
    async with connect(tokenizer) as client:
        answer = await client.post("/tokenize", json={"prompt": "a" * 70_000})
        assert answer.status_code == 503
        assert "has ended 2 times with this one" in answer.json()["error"]["message"]
        assert answer.headers["retry-after"] == "1"
        process._command = ["/nowhere/python"]
        answer = await client.post("/tokenize", json={"prompt": "a" * 70_000})
        assert answer.status_code == 503
        assert "cannot be tokenised now: No such file" in answer.json()["error"]["message"]
        assert (await client.post("/tokenize", json={"prompt": "a"})).status_code == 200
    process.close()


def test_texts_in_progress_are_refused_when_the_server_ends(own: TokenizerProcess) -> None:
    os.kill(pid(own), signal.SIGSTOP)
    said: list[str] = []

    def encode() -> None:
        with pytest.raises(UnavailableError) as caught:
            own.encode(TEXTS["hex"], add_special_tokens=False)
        said.append(str(caught.value))

    thread = threading.Thread(target=encode)
    thread.start()
    let_arrive()
    own.close()
    thread.join(20)
    assert said == ["the server is ending; send the request again later"]


def test_nothing_is_left_of_a_server_that_is_killed_or_ends() -> None:
    text = TEXTS["one letter"]
    for way in (ServerProcess.kill, ServerProcess.stop):
        with ServerProcess(()) as server:
            asked = urllib.request.Request(f"{server.url}/tokenize", json.dumps({"prompt": text}).encode())
            with urllib.request.urlopen(asked, timeout=60) as answer:
                assert json.load(answer)["tokens"] == HERE.encode(text, add_special_tokens=True)
            children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text()
            children += "".join(each.read_text() for each in Path(f"/proc/{server.pid}/task").glob("*/children"))
            (number,) = {
                int(each) for each in children.split()
                if b"headway.serving.tokenizer_child" in Path(f"/proc/{each}/cmdline").read_bytes()
            }  # fmt: skip
            assert not gone(number)
            way(server)
            until(lambda: gone(number), 30.0)  # noqa: B023


def test_the_process_imports_little() -> None:
    code = "import headway.serving.tokenizer_child, sys; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "numpy", "jinja2", "fastapi", "headway.runtime", "headway.serving.app"} & set(
        found.stdout.split()
    )
