"""An event log of a server as a trace: lanes, ends of requests, errors."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.cli.refusals import refusal

from headway.cli.main import main
from headway.core.errors import ConfigError
from headway.sim.report.perfetto import engine_trace


def batch(number: int, request: str, start: int, first: float, stages: int = 2) -> dict[str, Any]:
    """A chunk of 64 that takes 2 s on each of its stages, one after the other."""
    spans = [(first + 2.0 * stage, first + 2.0 * stage + 2.0) for stage in range(stages)]
    parts = [(0, 3, [(request, start, 64)], spans)]
    return {"event": "batch", "id": number, "at_s": spans[-1][1], "predicted_s": 1.9, "ended": [], "parts": parts}


def log(*batches: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"event": "add", "request": "long", "arrival_s": 9.0, "prompt": 256}, *batches]


def test_a_trace_has_a_thread_for_each_stage_and_the_end_of_each_request() -> None:
    end = {**batch(1, "long", 64, 12.0), "ended": ["long"]}
    events = engine_trace(log(batch(0, "long", 0, 10.0), end)).to_json()["traceEvents"]
    assert {e["args"]["name"] for e in events if e["name"] == "thread_name"} == {"stage 0", "stage 1"}
    slices = [(e["tid"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert slices == [(1, 1e6, 2e6), (2, 3e6, 2e6), (1, 3e6, 2e6), (2, 5e6, 2e6)]
    assert [(e["ph"], e["ts"]) for e in events if e.get("cat") == "request"] == [("b", 0.0), ("n", 1e6), ("e", 7e6)]


def test_the_command_and_a_log_without_stages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "events.jsonl", tmp_path / "trace.json"
    path.write_bytes(b"\n".join(msgspec.json.encode(event) for event in log(batch(0, "long", 0, 10.0))))
    assert main(["trace", str(path), "--out", str(out)]) == 0
    assert "2 slices on 2 lanes, 1 requests" in capsys.readouterr().out
    assert json.loads(out.read_text())["displayTimeUnit"] == "ms"
    assert main(["trace", str(path), "--out", "-"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["displayTimeUnit"] == "ms"
    assert "2 slices" in said.err
    with pytest.raises(ConfigError, match="older version"):
        engine_trace([{"event": "batch", "id": 0}])
    path.write_text("{}")
    assert "none.jsonl" in refusal(["trace", str(tmp_path / "none.jsonl")], capsys)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"schema": "headway.cluster.log/5"}, "its first line should name the schema headway.cluster.log/6"),
        ({"event": "start"}, "has no request and no batch"),
    ],
)
def test_a_log_without_drawable_events_does_not_overwrite_a_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: dict[str, Any], words: str
) -> None:
    path, out = tmp_path / "events.jsonl", tmp_path / "trace.json"
    path.write_bytes(
        msgspec.json.encode(line) + b"\n" + msgspec.json.encode({"event": "wake", "wake_s": None, "at_s": 0.0}) + b"\n"
    )
    out.write_text("of before")
    assert main(["trace", str(path), "--out", str(out)]) == 2
    assert re.search(words, capsys.readouterr().err)
    assert out.read_text() == "of before"
