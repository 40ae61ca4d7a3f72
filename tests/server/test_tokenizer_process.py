"""Long texts are encoded by a process of their own: the same ids and refusals, whatever becomes of the process."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.helpers.polling import let_arrive, until

from headway.core.errors import RequestError, UnavailableError
from headway.runtime import embedded
from headway.serving import tokenizer_process
from headway.serving.launch import load_tokenizer
from headway.serving.load.server_process import ServerProcess
from headway.serving.prompts import PromptReader
from headway.serving.settings import ServerSettings
from headway.serving.tokenizer import ModelTokenizer
from headway.serving.tokenizer_process import QUESTION, READY, TokenizerProcess, _ids, received
from headway.serving.tokenizing_memory import BYTES_PER_CHARACTER

EMBEDDED = Path(embedded.__file__).parent
MEMORY = 1 << 30
HERE = ModelTokenizer.load(EMBEDDED)
assert HERE._backend is not None
DESCRIPTION = HERE._backend.to_str()
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
    process = TokenizerProcess(DESCRIPTION, MEMORY)
    yield process
    process.close()


@pytest.fixture
def own() -> Iterator[TokenizerProcess]:
    """A process of one test, started with a short text."""
    process = TokenizerProcess(DESCRIPTION, MEMORY)
    process.encode("a", add_special_tokens=False)
    yield process
    process.close()


def pid(process: TokenizerProcess) -> int:
    return process._running[False][0].pid


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
    assert not tokenizer._process._running
    assert tokenizer.encode(text, add_special_tokens=True) == HERE.encode(text, add_special_tokens=True)
    number = pid(tokenizer._process)
    tokenizer.close()
    assert gone(number)
    with pytest.raises(UnavailableError, match="server is ending"):
        tokenizer.encode(text, add_special_tokens=False)


def test_many_texts_of_one_request_go_there_together(own: TokenizerProcess) -> None:
    reader, seen = PromptReader(ModelTokenizer(HERE._backend, process=own), 1 << 20, 64), [0]
    encode = own.encode

    def counted(text: str, **more: Any) -> Any:
        seen[0] += 1
        return encode(text, **more)

    own.encode = counted  # type: ignore[method-assign]
    # Shorter texts than a piece do not, however many they are: asking the process would take longer.
    for words, count, there in ((1500, 10, 0), (1500, 20, 20), (1300, 30, 0)):
        text, seen[0] = "some words, " * words, 0
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
    process, here = TokenizerProcess(DESCRIPTION, limit), ModelTokenizer.load(EMBEDDED, memory=limit)
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
    _, channel = own._channel(alone=False)
    with channel:
        assert channel.recv(1) == READY
        channel.sendall(QUESTION.pack(False, -1) + b"\xff")
        channel.shutdown(1)
        with pytest.raises(RuntimeError, match="could not be tokenised: UnicodeDecodeError"):
            _ids(received(channel))
    assert own.encode("a", add_special_tokens=False)
    assert pid(own) == number


def test_a_client_of_the_process_that_leaves_costs_nothing(own: TokenizerProcess) -> None:
    number = pid(own)
    for sent in (b"", QUESTION.pack(False, -1) + b"a" * 100_000):
        _, channel = own._channel(alone=False)
        channel.sendall(sent)
        channel.close()
    assert own.encode(TEXTS["hex"], add_special_tokens=False) == HERE.encode_long(
        TEXTS["hex"], add_special_tokens=False
    )
    assert pid(own) == number


def test_a_connection_that_breaks_ends_no_process(own: TokenizerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    number, channel = pid(own), own._channel
    monkeypatch.setattr(tokenizer_process, "_END_S", 0.01)

    def broken(alone: bool) -> Any:
        process, ours = channel(alone)
        if not alone:
            ours.shutdown(socket.SHUT_RDWR)
        return process, ours

    monkeypatch.setattr(own, "_channel", broken)
    assert own.encode("a quick fox", add_special_tokens=False) == HERE.encode_long(
        "a quick fox", add_special_tokens=False
    )
    assert pid(own) == number
    assert not gone(number)


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
    assert gone(first)


FAKE = """
import os, socket, sys
from headway.serving.tokenizer_process import ANSWER, IDS, QUESTION, READY, received
control, held = socket.socket(fileno=0), []
received(socket.socket(fileno=socket.recv_fds(control, 1, 1)[1][0]))
while files := socket.recv_fds(control, 1, 1)[1]:
    held.append(socket.socket(fileno=files[0]))
    held[-1].sendall(READY)
    text = received(held[-1])[QUESTION.size:].decode()
    with open(sys.argv[1], "a") as file:
        print(os.getpid(), text, file=file)
    first = open(sys.argv[1]).read().startswith(str(os.getpid()))
    if text == "bad":
        os._exit(1)
    if not first:
        held.pop().sendall(ANSWER.pack(IDS, 4) + bytes(4))
"""


def test_a_text_is_not_refused_for_another_that_ends_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process, seen, asked = TokenizerProcess("", MEMORY), tmp_path / "seen", []
    process._command, channel = [sys.executable, "-c", FAKE, str(seen)], process._channel
    monkeypatch.setattr(process, "_channel", lambda alone: asked.append(alone) or channel(alone))
    with ThreadPoolExecutor(1) as threads:
        good = threads.submit(process.encode, "good", add_special_tokens=False)
        until(seen.exists, 30.0)
        with pytest.raises(UnavailableError, match="two processes that tokenise long texts have failed with this one"):
            process.encode("bad", add_special_tokens=False)
        assert good.result() == array("i", [0])
    (first, *_), *_ = found = [line.split() for line in seen.read_text().splitlines()]
    assert [text for number, text in found if number == first] == ["good", "bad"]
    assert sorted(text for number, text in found if number != first) == ["bad", "good"]
    assert len({number for number, _ in found}) == 3
    # A text that is new meanwhile goes to neither of the last two.
    assert asked == [False, False, True, True]
    process.close()


def test_a_process_that_does_not_answer_is_ended(own: TokenizerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    number = pid(own)
    os.kill(number, signal.SIGSTOP)
    monkeypatch.setattr(tokenizer_process, "_ANSWER_S", 0.05)
    own._command = [sys.executable, "-c", "import time; time.sleep(600)"]
    with pytest.raises(UnavailableError, match="two processes"):
        own.encode("a", add_special_tokens=False)
    assert gone(number)
    assert not own._running


@pytest.mark.parametrize("command", [[sys.executable, "-c", "pass"], ["/nowhere/python"]])
def test_without_a_process_that_starts_the_server_tokenises(
    caplog: pytest.LogCaptureFixture, command: list[str]
) -> None:
    process = TokenizerProcess(DESCRIPTION, MEMORY)
    process._command = command
    tokenizer = ModelTokenizer(HERE._backend, process=process)
    for text in ("a" * 70_000, "some words, " * 25_000):
        assert tokenizer.encode(text, add_special_tokens=True) == HERE.encode(text, add_special_tokens=True)
    assert sum("no process starts for long texts" in each.message for each in caplog.records) == 1
    assert not process._running


@pytest.mark.anyio
async def test_it_ends_with_the_application(application: Any, own: TokenizerProcess) -> None:
    number = pid(own)
    async with application(ModelTokenizer(HERE._backend, process=own)):
        assert not gone(number)
    assert gone(number)


def test_its_tokenizer_is_the_server_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.json").write_text(DESCRIPTION)
    tokenizer = load_tokenizer(str(tmp_path), ServerSettings())
    for name in ("tokenizer.json", "chat_template.jinja", "tokenizers.py"):
        (tmp_path / name).write_text("{% broken")
    monkeypatch.chdir(tmp_path)
    process = tokenizer._process
    assert process is not None
    assert process.encode("a quick fox", add_special_tokens=True) == HERE.encode_long(
        "a quick fox", add_special_tokens=True
    )
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


@pytest.mark.long
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
