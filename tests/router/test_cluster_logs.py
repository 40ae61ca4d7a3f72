"""Event logs of a cluster: one for each process, and none takes the cluster with it."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from headway.cli.main import main
from headway.runtime.assembly.cluster import sink
from headway.runtime.assembly.instances import joining_config
from headway.runtime.engine.config import EngineConfig


def test_a_joining_instance_writes_its_own_event_log() -> None:
    config = EngineConfig(model="m", event_log="log.2")
    assert joining_config(config, 2, 5, 0).event_log == "log.5"
    assert joining_config(config, 2, 1, 3).event_log == "log.1.3"
    assert joining_config(EngineConfig(model="m"), 2, 5, 1).event_log is None


class _Full(io.BytesIO):
    calls = 0

    def write(self, line: object) -> int:
        self.calls += 1
        raise OSError(28, "No space left on device")


def test_a_decision_log_that_cannot_be_written_ends_without_an_error(caplog: pytest.LogCaptureFixture) -> None:
    full = _Full()
    write = sink(full)
    write(b"a\n")
    write(b"b\n")
    assert full.calls == 1
    assert "No space left" in caplog.text


def test_a_file_that_is_not_a_log_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, log = tmp_path / "cluster.yaml", tmp_path / "log"
    file.write_text("pools: [{count: 1}]\n")
    log.write_text(
        json.dumps({"schema": "headway.cluster.log/5", "links": {}, "about": {}}) + "\n" + json.dumps({"x": 1}) + "\n"
    )
    assert main(["cluster", str(file), "--replay", str(log)]) == 2
    said = capsys.readouterr().err
    assert said == f"headway: error: replay: {log}: line 2 of the log is not of a cluster's log\n"
