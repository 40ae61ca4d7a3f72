"""The server as a process: signals, draining, imports."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.helpers.fake_engine import FakeEngine

from headway.core.errors import ConfigError
from headway.serving.app import create_app
from headway.serving.run import serve
from headway.serving.settings import ServerSettings, bind
from headway.serving.tokenizer import ModelTokenizer

PROGRAM = """
import asyncio, sys
sys.path.insert(0, sys.argv[1])
from tests.helpers.fake_engine import FakeEngine
from headway.core.errors import ConfigError
from headway.serving.app import create_app
from headway.serving.run import serve
from headway.serving.settings import ServerSettings
from headway.serving.tokenizer import ModelTokenizer

class Engine(FakeEngine):
    async def start(self):
        if sys.argv[3] == "broken":
            raise ConfigError("no such model")
        while sys.argv[3] == "hangs":
            print("loading", file=sys.stderr, flush=True)
            await asyncio.sleep(0.1)
        self.telling = asyncio.create_task(tell())
        return await super().start()

    async def close(self):
        print("closed", file=sys.stderr, flush=True)

async def tell():
    told = 0
    while True:
        if told != app.state.headway.in_flight:
            told = app.state.headway.in_flight
            print("in flight:", told, file=sys.stderr, flush=True)
        await asyncio.sleep(0.01)

settings = ServerSettings(port=0, drain_timeout_s=float(sys.argv[4]))
engine = Engine(delay_s=float(sys.argv[2]))
app = create_app(engine, ModelTokenizer.none(), settings)
started = serve(app, settings)
print("ended", started, len(engine.aborted), file=sys.stderr, flush=True)
"""


class Process:
    """A server process, its port, and what it wrote to stderr."""

    def __init__(
        self,
        delay_s: float = 0.0,
        engine: str = "works",
        until: str = r"running on .*:(\d+)",
        drain_timeout_s: float = 20.0,
    ) -> None:
        words = (Path(__file__).parents[2], delay_s, engine, drain_timeout_s)
        command = [sys.executable, "-c", PROGRAM, *map(str, words)]
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env={**os.environ, "COLUMNS": "200"}
        )
        self.lines: list[str] = []
        found = self.read_until(until)
        self.port = int(found[1]) if found is not None and found.groups() else 0

    def read_until(self, words: str) -> re.Match[str] | None:
        """Read the log up to a line that matches `words`; return None at its end."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if found := re.search(words, line):
                return found
        return None

    def post(self, tokens: int) -> bytes:
        body = {"model": "fake-model", "prompt": [2], "max_tokens": tokens, "stream": True}
        url = f"http://127.0.0.1:{self.port}/v1/completions"
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode()), timeout=20) as answer:
            data = answer.read()
        assert isinstance(data, bytes)
        return data

    def end(self) -> str:
        assert self.process.stderr is not None
        self.lines += list(self.process.stderr)
        self.process.wait(20)
        return "".join(self.lines)

    def kill(self) -> None:
        assert self.process.stderr is not None
        self.process.kill()
        self.process.wait(20)
        self.process.stderr.close()


@pytest.fixture
def slow() -> Iterator[Process]:
    process = Process(0.02)
    yield process
    process.kill()


def _in_background(process: Process, tokens: int) -> tuple[threading.Thread, list[bytes]]:
    got: list[bytes] = []

    def call() -> None:
        try:
            got.append(process.post(tokens))
        except Exception as error:
            got.append(repr(error).encode())

    thread = threading.Thread(target=call)
    thread.start()
    return thread, got


def _until_busy(process: Process) -> None:
    url = f"http://127.0.0.1:{process.port}/metrics"
    idle = b'headway_time_to_first_token_seconds_count{engine="0",model_name="fake-model"} 0.0'
    while True:
        with urllib.request.urlopen(url, timeout=5) as answer:
            if idle not in answer.read():
                return


def test_sigterm_drains_the_server(slow: Process) -> None:
    thread, got = _in_background(slow, 30)
    _until_busy(slow)
    slow.process.send_signal(signal.SIGTERM)
    thread.join(20)
    assert got[0].endswith(b"data: [DONE]\n\n")
    log = slow.end()
    assert slow.process.returncode == 0
    assert "draining signal=SIGTERM in_flight=1 second_signal=" in log
    assert "closed" in log
    assert "ended True 0" in log


def _told_of_the_end(process: Process, *signals: signal.Signals) -> str:
    """A stream and three whole answers, all cut off by these signals: what the log says."""
    stream, events = _in_background(process, 4000)
    _until_busy(process)
    body = json.dumps({"model": "fake-model", "prompt": [2], "max_tokens": 4000}).encode()
    waiting = [_raw(process.port, b"POST /v1/completions", body) for _ in range(3)]
    late = _raw(process.port, b"POST /v1/completions", body, b'{"model": ')
    process.read_until("in flight: 4")
    for number in signals:
        process.process.send_signal(number)
    log = process.end()
    stream.join(20)
    for connection in (*waiting, late):
        head, _, content = connection.makefile("rb").read().partition(b"\r\n\r\n")
        connection.close()
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 5\r\n" in head.lower()
        error = json.loads(content)["error"]
        assert (error["type"], error["code"]) == ("ServiceUnavailableError", 503)
        assert "the server is ending" in error["message"]
    last = json.loads(events[0].split(b"\n\n")[-2].removeprefix(b"data: "))
    assert last["error"]["code"] == 503
    assert "Traceback" not in log
    assert process.process.returncode == 0
    return log


def _raw(port: int, what: bytes, body: bytes, sent: bytes | None = None) -> socket.socket:
    """A request of which the body, or that part of it, has been sent."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=20)
    head = b"%s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % (what, len(body))
    connection.sendall(head + (body if sent is None else sent))
    return connection


def test_a_second_signal_sends_an_error_to_every_waiting_client(slow: Process) -> None:
    log = _told_of_the_end(slow, signal.SIGINT, signal.SIGTERM)
    assert "ending at once" in log
    assert "closed" in log


def test_the_end_of_the_drain_time_sends_an_error_to_every_waiting_client() -> None:
    process = Process(0.02, drain_timeout_s=0.2)
    log = _told_of_the_end(process, signal.SIGTERM)
    assert "draining took too long in_flight=4" in log
    process.kill()


def test_another_process_that_listens_while_the_engine_starts_keeps_the_port() -> None:
    settings, engine = ServerSettings(port=0), FakeEngine()
    sockets = bind(settings.host, settings.port)
    port = sockets[0].getsockname()[1]
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", port))
        other.listen()
        app = create_app(engine, ModelTokenizer.none(), ServerSettings(port=port))
        with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1 is in use"):
            serve(app, ServerSettings(port=port), sockets=sockets)
    assert engine.closed


def test_an_engine_that_cannot_start_leaves_its_error_to_the_caller_without_a_stack_trace() -> None:
    process = Process(engine="broken")
    log = process.end()
    assert "info not started" in log
    # The command prints it, once.
    assert "no such model" not in log
    assert "Traceback" not in log
    assert "closed" in log
    assert "ended False" in log
    process.kill()


def test_a_signal_while_the_engine_starts_ends_the_wait() -> None:
    process = Process(engine="hangs", until="loading")
    process.process.send_signal(signal.SIGTERM)
    log = process.end()
    assert "Traceback" not in log
    assert "ended False" in log
    process.kill()


def test_open_binding_without_a_key_is_refused() -> None:
    settings = ServerSettings(host="0.0.0.0")
    with pytest.raises(ConfigError, match="API key"):
        serve(create_app(FakeEngine(), ModelTokenizer.none(), settings), settings)


def test_the_server_imports_neither_torch_nor_transformers() -> None:
    code = "import headway.serving.app, headway.serving.run, sys; print([m for m in sys.modules if '.' not in m])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    for heavy in ("torch", "numpy", "matplotlib", "transformers", "openai"):
        assert f"'{heavy}'" not in loaded
