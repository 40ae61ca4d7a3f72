"""Event logs of a cluster: one for each process, and none takes the cluster with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.helpers.simulated_disk import SimulatedDisk

from headway.cli.main import main
from headway.control.log import read_log
from headway.core import logs
from headway.core.errors import ConfigError
from headway.core.logs import LogSink
from headway.runtime.assembly.cluster import joining_config
from headway.runtime.engine.config import EngineConfig

HEADER = json.dumps({"event": "start", "schema": "headway.cluster.log/6", "links": {}, "about": {}})


def test_a_joining_instance_writes_its_own_event_log() -> None:
    config = EngineConfig(model="m", event_log="log.2")
    assert joining_config(config, 2, 5, 0).event_log == "log.5"
    assert joining_config(config, 2, 1, 3).event_log == "log.1.3"
    assert joining_config(EngineConfig(model="m"), 2, 5, 1).event_log is None


def test_a_decision_log_goes_on_when_its_disk_is_well_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SimulatedDisk(0)
    monkeypatch.setattr(logs, "os", disk)
    write = LogSink(str(tmp_path / "log"))
    disk.full = True
    write("wake", {"wake_s": 1.0})
    write("arrived", {})
    assert "No space left" in caplog.text
    disk.full = False
    write("decided", {})
    kinds = [json.loads(line)["event"] for line in (tmp_path / "log").read_bytes().splitlines()]
    assert kinds == ["wake", "arrived", "decided"]


def test_a_log_with_a_gap_is_not_decided_again() -> None:
    with pytest.raises(ConfigError, match="line 2 of the log says that the disk did not take 7 lines"):
        read_log([HEADER, '{"event":"missing","lines":7}'])


def test_a_file_that_is_not_a_log_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, log = tmp_path / "cluster.yaml", tmp_path / "log"
    file.write_text("pools: [{count: 1}]\n")
    log.write_text(HEADER + '\n{"x": 1}\n')
    assert main(["cluster", str(file), "--replay", str(log)]) == 2
    said = capsys.readouterr().err
    assert said == f"headway: error: replay: {log}: line 2 of the log is not of a cluster's log\n"
