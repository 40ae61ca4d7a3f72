"""What an engine's process says of its end, to the server and in its log."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from headway.runtime.engine.config import EngineConfig, InstanceConfig
from headway.runtime.engine.process import start_engine
from headway.runtime.engine.protocol import FatalError, IterationOutputs

MODULE = "tests.helpers.fake_engine_process"


def last_words(folder: Path, model: str, **fields: object) -> FatalError:
    """Of an engine that is started so."""

    async def listen() -> FatalError:
        child = start_engine(EngineConfig(model=model, **fields), MODULE, folder, 0)
        try:
            while not isinstance(message := await asyncio.wait_for(child.receive(), 60), FatalError):
                assert not isinstance(message, IterationOutputs)
            assert await child.wait_until_exited() == "has ended with exit code 1"
            return message
        finally:
            child.end()

    return asyncio.run(listen())


@pytest.mark.parametrize(
    ("model", "words", "final", "logged"),
    [
        ("foreseen", "the checkpoint has no tensors", True, []),
        ("unforeseen", "the engine cannot start: the moon is full", True, ["error the engine cannot start"]),
        (
            "bereft",
            "the engine failed: worker 1 has ended with signal 9 (SIGKILL)",
            False,
            ["warning this engine ends: worker 1 has ended with signal 9 (SIGKILL)"],
        ),
        ("puzzled", "the engine failed: 7 is no colour", False, ["error the engine cannot go on"]),
        ("worn", "the workers were lost 4 times in a row", True, []),
    ],
)
def test_a_fatal_error_is_reported(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], model: str, words: str, final: bool, logged: list[str]
) -> None:
    assert last_words(tmp_path, model) == FatalError(words, final)
    lines = capfd.readouterr().err.splitlines()
    own = [line.partition(" ")[2] for line in lines if line[:2] == "20"]
    assert own == ["info loading", *logged]
    puzzling = model in ("unforeseen", "puzzled")
    assert ("Traceback (most recent call last):" in lines) == puzzling
    assert puzzling or len(lines) == len(own)


def test_log_lines_are_as_the_server_s(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    own = InstanceConfig(number=3, listen="unix:nowhere")
    last_words(tmp_path, "bereft", log_level="warning", log_format="json", instance=own)
    (line,) = map(json.loads, capfd.readouterr().err.splitlines())
    assert line.pop("time").startswith("20")
    assert line == {
        "level": "warning",
        "logger": "headway.engine",
        "message": "this engine ends: worker 1 has ended with signal 9 (SIGKILL)",
        "instance": 3,
    }
