"""A cluster's log read back: spans and KV transfers as they ran, as a trace, on the page, explained."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from tests.controller.test_cluster_replay import OPTIONS, TRAFFIC, made
from tests.helpers.cluster_worlds import cluster, lines_into

from headway.cli.main import main
from headway.core.errors import ConfigError
from headway.perf.latency import eq1
from headway.serving.live.pages import LogPlayer
from headway.serving.live.recordings import ClusterRecording
from headway.sim.cluster.simulation import simulate_cluster
from headway.sim.cluster.state import ClusterResult
from headway.sim.replay import is_cluster_log, read_cluster
from headway.sim.spec import NoiseSpec, RunSpec
from headway.sim.workload import TraceRequest
from headway_research.fit.eq1_command import prefill_samples

POLICIES = sorted(set(OPTIONS) - {"jsq", "loongserve"})


def recorded(name: str, file: Path) -> ClusterResult:
    """A simulated run, and its log in a file."""
    lines: list[bytes] = []
    run = RunSpec(noise=NoiseSpec(kind="lognormal", amount=0.3), seed=5)
    result = simulate_cluster(cluster(4, 2), made(name), TRAFFIC, run, keep_bars=True, record=lines_into(lines))
    file.write_bytes(b"".join(lines))
    return result


@pytest.mark.parametrize("name", POLICIES)
def test_spans_and_transfers_are_those_of_the_run(name: str, tmp_path: Path) -> None:
    result = recorded(name, tmp_path / "log")
    run = read_cluster(tmp_path / "log")
    bars = {(b.request, b.instance, b.start_s, b.end_s) for b in result.bars if b.kind == "span"}
    assert bars
    assert {(s.request, i, s.start_s, s.end_s) for s in run.spans for i in s.group} == bars
    sent = {(b.request, b.instance, b.start_s, b.end_s) for b in result.bars if b.kind == "transfer"}
    assert {(n, t.source, t.start_s, t.end_s) for n, t in run.transfers} >= sent
    assert len(run.requests) == len(TRAFFIC)


def test_equation_1_is_fitted_to_what_the_groups_of_a_cluster_took(tmp_path: Path) -> None:
    """`PerToken` takes a millisecond a token, divided by the group; spans that were paused are left out."""
    log, fit, lines = tmp_path / "log", tmp_path / "fit.json", list[bytes]()
    traffic = [TraceRequest(0.5 * i, 900 + 2000 * (i % 7) if i % 2 else 200, 4) for i in range(60)]
    simulate_cluster(cluster(4, 2), made("ladder"), traffic, RunSpec(), record=lines_into(lines))
    log.write_bytes(b"".join(lines))
    run = read_cluster(log)
    samples = prefill_samples(run)
    assert 10 < len(samples) < len(run.spans), "those that were paused are in parts"
    assert main(["profile", "fit-eq1", str(log), "--out", str(fit)]) == 0
    found = eq1.load(fit)
    assert found.sizes
    for sp, c in found.sizes.items():
        assert c.prefill_s(0, 4000) == pytest.approx(4.0 / sp, rel=1e-3)
    log.write_bytes(lines[0])
    assert main(["profile", "fit-eq1", str(log), "--out", str(fit)]) == 2


def test_the_commands_read_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, out, why = tmp_path / "log", tmp_path / "trace.json", tmp_path / "why.json"
    result = recorded("tetris", log)
    assert is_cluster_log(log)
    assert main(["trace", str(log), "--out", str(out)]) == 0
    events = json.loads(out.read_text())["traceEvents"]
    assert {e["pid"] for e in events if e["ph"] == "X"} <= {1, 2, 3, 4}
    assert sum(e.get("cat") == "KV" for e in events) == 2 * len(read_cluster(log).transfers)
    capsys.readouterr()
    long = next(r for r in result.sim.records if r.prompt_tokens == 16_000)
    assert main(["why", long.id, "--log", str(log), "--json", str(why)]) == 0
    told = json.loads(why.read_text())
    assert told["ttft_s"] == pytest.approx(long.token_s[0] - long.arrival_s, abs=1e-6)
    assert sum(one["seconds"] for one in told["intervals"]) == pytest.approx(told["ttft_s"], abs=1e-3)
    assert told["causes_of_ttft"]["its own prefill"] > 0
    assert main(["why", long.id, "--log", str(log), "--under", "fcfs"]) == 2
    assert "log of one engine" in capsys.readouterr().err


def test_a_gap_in_which_kv_moved_says_from_where_to_where(tmp_path: Path) -> None:
    log = tmp_path / "log"
    recorded("tetris", log)
    run = read_cluster(log)
    name, moved = run.transfers[-1]
    # A decode instance's log: its first token there comes behind the transfer.
    end_s = moved.end_s + 0.5 * ((run.requests[name].end_s or 0.0) - moved.end_s)
    add = {"event": "add", "request": name, "at_s": moved.end_s, "prompt": 200, "phase": "decode"}
    stages = [[0.5 * (moved.end_s + end_s), end_s]]
    batch = {
        "event": "batch", "id": 0, "at_s": end_s, "predicted_s": 0.01, "decodes": 1, "chunks": [],
        "ended": [name], "parts": [[0, 1, [], stages]],
    }  # fmt: skip
    (tmp_path / f"log.{moved.target}").write_bytes(b"\n".join(map(msgspec.json.encode, (add, batch))))
    told = ClusterRecording(read_cluster(log)).why(name, [])[0]
    causes = [(one.cause, one.rule) for one in told.worst_gap]
    assert ("KV transfer", f"from instance {moved.source} to {moved.target}") in causes
    assert causes[-1][0] == "own token"
    assert sum(one.seconds for one in told.worst_gap) == pytest.approx(end_s - told.record.token_s[0])


def test_the_page_plays_it(tmp_path: Path) -> None:
    recorded("pecsched", tmp_path / "log")
    player = LogPlayer(ClusterRecording(read_cluster(tmp_path / "log")), "log")
    page = player.page(0, 0, player.span[1])
    assert [one["id"] for one in page["instances"]] == list(range(6))
    prompts = sum(chunk[2] for block in page["blocks"] for chunk in block[-1])
    longs = {span.request for span in read_cluster(tmp_path / "log").spans}
    assert prompts == sum(TRAFFIC[int(name[1:])].prompt_tokens for name in longs)


def test_a_damaged_or_foreign_log_is_refused(tmp_path: Path) -> None:
    log = tmp_path / "log"
    recorded("fifo", log)
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join([*lines[:50], b"garbage\n", *lines[51:]]))
    with pytest.raises(ConfigError, match="line 51"):
        read_cluster(log)
    log.write_text("nothing")
    assert not is_cluster_log(log)
    with pytest.raises(ConfigError, match="cannot read"):
        is_cluster_log(tmp_path / "none")
