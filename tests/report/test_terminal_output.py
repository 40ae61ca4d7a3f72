"""What commands print: sweep tables with whole names, and what is left where a pipe closes early or a signal comes."""

from __future__ import annotations

import io
import itertools
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.helpers.marks import quick_first
from tests.helpers.polling import until
from tests.helpers.process_tree import child_pids, ends_soon

from headway.cli.main import main
from headway.sim.build import requests_of
from headway.sim.report import tables
from headway.sim.report.tables import sweep_sentence, sweep_table
from headway.sim.scenario import parse_scenario
from headway.sim.sweep import parse_points, parse_sweep, with_common_draws

PLAN = Path(__file__).resolve().parents[2] / "examples" / "plan-chat-and-documents.yaml"


def point(at: dict[str, Any]) -> dict[str, Any]:
    cuts = {"p50": 0.386, "p99": 22.4}
    latencies = dict.fromkeys(("ttft_s", "tbt_s", "max_tbt_s", "e2e_s"), cuts)
    block = {
        "class": "document",
        "good": 1,
        "requests": 2,
        "good_share": 0.5,
        "starved_share": 0.0,
        "unfinished": 2,
        **latencies,
    }
    return {"at": at, "feasible": True, "ci95": None, "mean": {"classes": [block], "use": {"mfu": 0.3}}}


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_sweep_table_cuts_no_name_at_any_width(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(tables, "Console", lambda **given: Console(**{"file": out, "width": width, **given}))
    table = sweep_table([point({"workload.qps": 0.5, "policy.policy": "lars"})], "a title", (), wide=True)
    tables.show(table)
    text = out.getvalue()
    assert "…" not in text
    for name in ("workload.qps × policy.policy", "qps", "policy", "document", "worst TBT p99", "unfinished", "22.4 s"):
        assert name in text


@pytest.mark.parametrize(
    ("shares", "said"),
    [
        ([0.5], "50.0% of document in their SLO with policy 0"),
        ([0.5, 0.9, 0.5], "90.0% of document in their SLO with policy 1, 50.0% with policy 0"),
        ([0.5, 0.5], "50.0% of document in their SLO at each of 2 points"),
    ],
)
def test_a_sweep_s_sentence_names_no_point_twice(shares: list[float], said: str) -> None:
    points = [point({"policy.policy": str(index)}) for index in range(len(shares))]
    for each, share in zip(points, shares, strict=True):
        each["mean"]["classes"][0]["good_share"] = share
    assert sweep_sentence(points, {"document"}) == said


def test_fields_that_end_alike_keep_their_whole_names() -> None:
    out = io.StringIO()
    Console(file=out, width=300).print(
        sweep_table([point({"cluster.pools.0.count": 1, "cluster.pools.1.count": 2})], "", ())
    )
    assert "cluster.pools.0.count  cluster.pools.1.count" in out.getvalue()


def test_loads_of_a_sweep_have_the_same_requests_closer_together() -> None:
    data = {
        "model": "llama-3-8b",
        "workload": {"qps": 1.0, "mix": [{"share": 1, "prompt": "uniform:100-9000", "output": "uniform:1-99"}]},
        "run": {"window_s": 60, "seeds": [3]},
    }
    sweeps = [parse_sweep("workload.qps=0.5,1,2")]
    points = parse_points(with_common_draws(data, sweeps), sweeps)
    drawn = [requests_of(each.scenario.workload, 60.0, 3) for each in points]
    assert len(drawn[0]) < len(drawn[1]) < len(drawn[2])
    for fewer, more in itertools.pairwise(drawn):
        for slow, fast in zip(fewer, more, strict=False):
            assert (slow.prompt_tokens, slow.output_tokens) == (fast.prompt_tokens, fast.output_tokens)
            assert slow.arrival_s == pytest.approx(2 * fast.arrival_s)
    # Sweeps of other fields, and numbers that the scenario fixes, stay as they are.
    assert with_common_draws(data, [parse_sweep("policy.policy=fcfs,lars")]) == data
    fixed = {**data, "workload": {**data["workload"], "requests": 9}}
    assert with_common_draws(fixed, sweeps) == fixed
    assert parse_scenario(data).workload.draws is None


def headway(*words: str) -> list[str]:
    return [sys.executable, "-m", "headway.cli.main", *words]


def test_a_pipe_that_closes_early_ends_the_command_without_a_traceback() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(headway("simulate", "--schema"), stdout=writing, stderr=subprocess.PIPE, check=False)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


def test_a_trace_is_written_into_a_folder_that_did_not_exist_or_refused_in_a_line(tmp_path: Path) -> None:
    log = tmp_path / "events"
    log.write_text('{"event": "add", "request": "r", "arrival_s": 1.0, "prompt": 9}\n')
    assert main(["trace", str(log), "--out", str(tmp_path / "new" / "t.json")]) == 0
    assert (tmp_path / "new" / "t.json").exists()
    done = subprocess.run(headway("trace", str(log), "--out", str(log / "t.json")), capture_output=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(b"headway: error: cannot write")
    assert done.stderr.count(b"\n") == 1


@pytest.mark.parametrize(
    ("number", "to_all"), quick_first([(signal.SIGTERM, False), (signal.SIGINT, True), (signal.SIGKILL, False)])
)
def test_a_command_that_is_cut_off_leaves_no_process_and_no_warning(number: signal.Signals, to_all: bool) -> None:
    child = subprocess.Popen(
        headway("plan", str(PLAN), "--jobs", "2"),
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # background jobs ignore it
    )  # fmt: skip

    def workers() -> list[int]:
        # Each has a second thread once it works: the one that ends it with its parent.
        pids = child_pids(child.pid)
        return [pid for pid in pids if len(list(Path(f"/proc/{pid}/task").iterdir())) > 1]

    try:
        until(lambda: len(workers()) == 2, 60)
        begun = workers()
        (os.killpg if to_all else os.kill)(child.pid, number)
        # A process that stayed would hold the pipe.
        said = child.communicate(timeout=60)[1]
        assert all(ends_soon(pid) for pid in begun)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    if number == signal.SIGKILL:
        return
    assert (child.returncode, said) == (130, "")
