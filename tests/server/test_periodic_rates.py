"""`headway profile rates --every`: a server's improvement rates follow the lengths that its log has had lately."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.cluster_worlds import cluster
from tests.helpers.fake_cluster import FakeCluster

from headway.cli import profile_rates
from headway.cli.main import main
from headway.policy.placement.registry import make_placement
from headway.sim.cluster.simulation import simulate_cluster
from headway.sim.workload import TraceRequest

SCENARIO = {
    "cluster": {
        "placement": "tetris",
        "pools": [{"role": "prefill", "count": 16}, {"role": "decode", "count": 2, "tp": 8}],
        "spans": {"source": "tetris-table1"},
    },
    "workload": {"preset": "tetris-medium", "qps": 3.0, "requests": 120},
}


def log_lines(prompts: list[int]) -> list[bytes]:
    """A cluster's log as it is sent requests with these prompts."""
    lines, ring = list[bytes](), cluster(2)
    requests = [TraceRequest(float(second), prompt, 1) for second, prompt in enumerate(prompts)]
    simulate_cluster(ring, make_placement("fifo", ring.policy_context, {}), requests, record=lines.append)
    return lines


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    (tmp_path / "cluster.yaml").write_text(json.dumps(SCENARIO))
    return [
        "profile", "rates", str(tmp_path / "cluster.yaml"), "--out", str(tmp_path / "rates.json"), "--requests", "12",
        "--loads", "1:2:1", "--seeds", "3", "--lengths", str(tmp_path / "log"),
    ]  # fmt: skip


def test_rates_are_sent_again_and_again_once_requests_have_come(
    tmp_path: Path, live: Any, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log, engine, waits = tmp_path / "log", FakeCluster(), list[float]()
    lines = log_lines([777] * 5 + [888] * 12)
    log.write_bytes(lines[0])
    drawn: list[set[str]] = []
    trace_of: Callable[..., Path] = profile_rates._trace_of

    def keep(*given: Any) -> Path:
        trace = trace_of(*given)
        drawn.append(set(trace.read_text().split()[1:]))
        return trace

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 1:
            assert engine.rates is None
            arrived = [line for line in lines if b'["RequestArrived"' in line]
            log.write_bytes(b"".join([lines[0], *arrived[:5]]))
        elif len(waits) == 2:
            assert engine.rates is not None
            engine.rates = None
            log.write_bytes(b"".join(lines))
        else:
            raise KeyboardInterrupt

    monkeypatch.setattr(profile_rates, "sleep", wait)
    monkeypatch.setattr(profile_rates, "_trace_of", keep)
    with live(engine) as url:
        assert main([*words, "--url", url, "--every", "60"]) == 130
    assert waits == [60.0] * 3
    assert drawn == [{"0,777,1"}, {"0,888,1"}]
    assert engine.rates is not None
    assert [load for load, _ in engine.rates.points] == [1.0, 2.0]
    said = capsys.readouterr()
    assert said.err.count("has no requests yet") == 1
    assert said.out.count(f"in use at {url}") == 2


def test_a_table_that_no_cluster_takes_is_an_error_where_it_is_sent_once(
    tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "log").write_bytes(b"".join(log_lines([777])))
    assert main([*words, "--url", "http://127.0.0.1:9"]) == 2
    assert "does not answer" in capsys.readouterr().err
    assert (tmp_path / "rates.json").exists()
    assert main([*words, "--every", "5"]) == 2
    assert "--every is above 0 seconds, and needs --lengths and --url" in capsys.readouterr().err
