"""A pipe, a folder, a device or nothing in place of a file that a command takes: one sentence, and no command waits."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.helpers.lies import NO_FILES, bounded, check_sentence, replace_file

from headway.cli.main import main
from headway.core.errors import ConfigError
from headway.core.files import read_lines, write_output
from headway.core.logs import open_event_log
from headway.perf.latency import device_fit, eq1, table
from headway.planning.answer import read_measures
from headway.policy.placement.contract import load_rates
from headway.runtime.embedded import model_path
from headway.serving.journal import RequestJournal
from headway.serving.tokenizer import ModelTokenizer

SCENARIO = "model: llama-3-8b\nworkload: {{trace: {file}}}\n"


def command(*words: str) -> Callable[[Path], object]:
    return lambda path: main([str(path) if word == "FILE" else word for word in words])


def traced(path: Path) -> object:
    scenario = path.with_name("scenario.yaml")
    scenario.write_text(SCENARIO.format(file=path))
    return main(["simulate", str(scenario)])


def replayed(path: Path) -> object:
    cluster = path.with_name("cluster.yaml")
    cluster.write_text("pools: [{count: 2}]\n")
    return main(["cluster", str(cluster), "--replay", str(path)])


TAKERS: dict[str, Callable[[Path], object]] = {
    "simulate": command("simulate", "FILE"),
    "compare": command("compare", "FILE"),
    "plan": command("plan", "FILE"),
    "trace": command("trace", "FILE", "--out", "-"),
    "why": command("why", "r1", "--log", "FILE"),
    "watch": command("watch", "FILE"),
    "cluster": command("cluster", "FILE", "--dry-run"),
    "cluster --replay": replayed,
    "serve --config": command("serve", "--config", "FILE", "--print-config"),
    "accel": command("accel", "stage", "FILE"),
    "prepare": command("prepare", "FILE", "--url", "http://127.0.0.1:1", "--model", "m"),
    "bench --trace": command("bench", "--url", "http://127.0.0.1:1", "--model", "m", "--trace", "FILE"),
    "profile fit-eq1": command("profile", "fit-eq1", "FILE", "--out", "-"),
    "profile check": command("profile", "check", "FILE"),
    "a trace": traced,
    "a profile": lambda path: table.load(path, None),
    "a fit": eq1.load,
    "a device's fit": device_fit.load,
    "rates": load_rates,
    "results to go on from": lambda path: read_measures(path, None),
    "a chat template": lambda path: ModelTokenizer.load(model_path(), chat_template=str(path)),
}


@pytest.mark.parametrize("kind", NO_FILES)
@pytest.mark.parametrize("taker", TAKERS)
def test_what_is_no_file_is_refused(
    taker: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if (taker, kind) == ("results to go on from", "nothing"):
        return
    monkeypatch.setenv("HEADWAY_STANDBY", "false")
    path = tmp_path / "file.csv"
    replace_file(path, kind)
    # Only where a reader waits for ever is there an alarm.
    signal.alarm(300)
    try:
        with bounded():
            assert TAKERS[taker](path) == 2
        said = capsys.readouterr().err.strip().splitlines()[-1]
        assert said.startswith("headway: error: ")
    except ConfigError as error:
        said = str(error)
    finally:
        signal.alarm(0)
    check_sentence(said)


@pytest.mark.parametrize("kind", ["a pipe", "a folder", "a loop"])
def test_an_output_that_nobody_takes_is_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    replace_file(path, kind)
    for write in (lambda: write_output(path, b"x"), lambda: open_event_log(str(path))):
        with pytest.raises(ConfigError) as caught:
            write()
        check_sentence(str(caught.value))
    assert os.path.lexists(path)


@pytest.mark.parametrize("kind", ["a pipe", "a device", "a loop"])
def test_a_journal_that_is_no_folder_is_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "journal"
    replace_file(path, kind)
    with pytest.raises(ConfigError) as caught:
        RequestJournal(path)
    check_sentence(str(caught.value))


def test_a_pipe_that_is_read_is_written_to(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    write_output(path, b"one")
    assert os.read(reader, 10) == b"one"
    os.close(reader)


def test_lines_are_bounded(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"a\nb")
    assert list(read_lines(path)) == [b"a\n", b"b"]
    os.truncate(path, 1 << 40)
    with pytest.raises(OSError, match="a line of more than"):
        list(read_lines(path))
