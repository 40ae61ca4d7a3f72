"""The server as a process: signals, draining, and what it imports."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway.core.errors import ConfigError
from headway.server.app import create_app
from headway.server.run import serve
from headway.server.settings import ServerSettings
from headway.server.tokenizer import Tokenizer

PROGRAM = """
import asyncio, sys
sys.path.insert(0, sys.argv[1])
from fake_engine import FakeEngine
from headway.core.errors import ConfigError
from headway.server.app import create_app
from headway.server.run import serve
from headway.server.settings import ServerSettings
from headway.server.tokenizer import Tokenizer

class Engine(FakeEngine):
    async def start(self):
        if sys.argv[3] == "broken":
            raise ConfigError("no such model")
        while sys.argv[3] == "hangs":
            print("loading", file=sys.stderr, flush=True)
            await asyncio.sleep(0.1)
        return await super().start()

    async def close(self):
        print("closed", file=sys.stderr, flush=True)

settings = ServerSettings(port=0, drain_timeout_s=20)
engine = Engine(delay_s=float(sys.argv[2]))
started = serve(create_app(engine, Tokenizer.none(), settings), settings)
print("ended", started, len(engine.aborted), file=sys.stderr, flush=True)
"""


class Process:
    """A server process, its port, and what it wrote to stderr."""

    def __init__(self, delay_s: float = 0.0, engine: str = "works", until: str = r"running on .*:(\d+)") -> None:
        command = [sys.executable, "-c", PROGRAM, str(Path(__file__).parent), str(delay_s), engine]
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env={**os.environ, "COLUMNS": "200"}
        )
        assert self.process.stderr is not None
        self.lines: list[str] = []
        self.port = 0
        for line in self.process.stderr:
            self.lines.append(line)
            found = re.search(until, line)
            if found:
                self.port = int(found[1]) if found.groups() else 0
                break

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


def test_sigterm_drains(slow: Process) -> None:
    thread, got = _in_background(slow, 30)
    _until_busy(slow)
    slow.process.send_signal(signal.SIGTERM)
    thread.join(20)
    assert got[0].endswith(b"data: [DONE]\n\n")
    log = slow.end()
    assert slow.process.returncode == 0
    assert "draining signal=SIGTERM in_flight=1" in log
    assert "closed" in log
    assert "ended True 0" in log


def test_second_signal_ends_at_once(slow: Process) -> None:
    thread, got = _in_background(slow, 4000)
    _until_busy(slow)
    slow.process.send_signal(signal.SIGINT)
    slow.process.send_signal(signal.SIGTERM)
    log = slow.end()
    thread.join(20)
    assert slow.process.returncode is not None
    assert "ending at once" in log
    assert "[DONE]" not in got[0].decode()


def test_an_engine_that_cannot_start_says_so_without_a_stack_trace() -> None:
    process = Process(engine="broken")
    log = process.end()
    assert 'reason="no such model"' in log
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
    sys.path.insert(0, str(Path(__file__).parent))
    from fake_engine import FakeEngine

    settings = ServerSettings(host="0.0.0.0")
    with pytest.raises(ConfigError, match="API key"):
        serve(create_app(FakeEngine(), Tokenizer.none(), settings), settings)


def test_no_heavy_imports() -> None:
    code = "import headway.server.app, headway.server.run, sys; print([m for m in sys.modules if '.' not in m])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    for heavy in ("torch", "numpy", "matplotlib", "transformers", "openai"):
        assert f"'{heavy}'" not in loaded
