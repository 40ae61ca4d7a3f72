"""`headway profile rates --every`: a server's improvement rates follow the lengths that its log has had lately."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.cli.refusals import refusal
from tests.helpers.cluster_worlds import cluster, lines_into
from tests.server.fake_cluster import FakeClusterEngine

from headway.cli.main import main
from headway.core.errors import ConfigError
from headway.policy.placement.registry import make_placement
from headway.serving.load.client import ask
from headway.sim.cluster.simulation import simulate_cluster
from headway.sim.workload import TraceRequest
from headway_research.tetris import profile_rates
from headway_research.tetris import rates as tetris_rates

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
    simulate_cluster(ring, make_placement("fifo", ring.policy_context, {}), requests, record=lines_into(lines))
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
    log, engine, waits = tmp_path / "log", FakeClusterEngine(), list[float]()
    lines = log_lines([777] * 5 + [888] * 12)
    drawn: list[set[str]] = []
    trace_of: Callable[..., Path] = profile_rates._trace_of

    def keep(*given: Any) -> Path:
        trace = trace_of(*given)
        drawn.append(set(trace.read_text().split()[1:]))
        return trace

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) <= 2:
            log.write_bytes(b"" if len(waits) == 1 else lines[0])
        elif len(waits) == 3:
            assert engine.rates is None
            arrived = [line for line in lines if b'["RequestArrived"' in line]
            log.write_bytes(b"".join([lines[0], *arrived[:5]]))
        elif len(waits) == 4:
            assert engine.rates is not None
            engine.rates = None
            log.write_bytes(b"".join(lines))
        else:
            raise KeyboardInterrupt

    monkeypatch.setattr(profile_rates, "sleep", wait)
    monkeypatch.setattr(profile_rates, "_trace_of", keep)
    with live(engine) as url:
        assert main([*words, "--url", url, "--every", "60"]) == 130
    assert waits == [60.0] * 5
    assert drawn == [{"0,777,1"}, {"0,888,1"}]
    assert engine.rates is not None
    assert [load for load, _ in engine.rates.points] == [1.0, 2.0]
    said = capsys.readouterr()
    assert said.err.count("does not exist, or is empty") == 2
    assert said.err.count("has no requests yet") == 1
    assert said.out.count(f"in use at {url}") == 2


def test_a_table_that_no_cluster_takes_is_an_error_where_it_is_sent_once(
    tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "log").write_bytes(b"".join(log_lines([777])))
    assert main([*words, "--url", "http://127.0.0.1:9"]) == 2
    assert "does not answer" in capsys.readouterr().err
    assert (tmp_path / "rates.json").exists()
    assert "and needs --lengths and --url" in refusal([*words, "--every", "5"], capsys)


@pytest.mark.parametrize("every", ["0", "-1", "2e7"])
def test_a_pause_without_end_is_refused(words: list[str], every: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "--url", "http://127.0.0.1:9", f"--every={every}"]) == 2
    assert "--every is above 0 and at most" in capsys.readouterr().err


def test_a_url_without_a_scheme_and_a_trace_taken_again_are_refused_before_any_simulation(
    tmp_path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def simulated(*_: object) -> float:
        raise AssertionError

    monkeypatch.setattr(tetris_rates, "scenario_ttft_s", simulated)
    (tmp_path / "log").write_text("arrival_s,prompt_tokens,output_tokens\n0,777,1\n")
    assert "write it like http://" in refusal([*words, "--url", "localhost:8000"], capsys)
    assert "is no log of a cluster" in refusal([*words, "--url", "http://127.0.0.1:9", "--every", "5"], capsys)


@pytest.mark.parametrize("answer", [b"", b"no HTTP\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{"])
def test_a_server_that_hangs_or_speaks_no_http_does_not_answer(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor() as pool:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        asked = pool.submit(ask, "PUT", url, None, {}, 0.5 if not answer else 60.0)
        connection, _ = listener.accept()
        with connection:
            connection.recv(1 << 16)
            if answer:
                connection.sendall(answer)
                connection.shutdown(socket.SHUT_WR)
            with pytest.raises(ConfigError, match="does not answer"):
                asked.result()
