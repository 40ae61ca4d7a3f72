"""The plug-in's decision log: a replay decides the same without vLLM, and finds what was changed."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.config", reason="vLLM is not in this environment: make test-vllm")

from tests.vllm.contract.virtual_engine import VirtualEngine, storm

from headway.perf.latency.table import TableSource, save
from headway.sim.calibration import calibrate
from headway.sim.explanation import explain
from headway.sim.replay import read_log, replay
from headway.sim.report.perfetto import engine_trace
from headway.vllm import plugin
from headway.vllm.endpoint import WhyEndpoint

Make = Callable[..., VirtualEngine]
pytestmark = pytest.mark.long


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def made(settings: dict[str, Any], **more: Any) -> VirtualEngine:
        return VirtualEngine(settings={**settings, "log": str(tmp_path / "log")}, **more)

    return made


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_replay_of_the_log_decides_the_same(make: Make, tmp_path: Path, seed: int, asynchronous: bool) -> None:
    engine = make({"t_target_ms": 25}, blocks=600, asynchronous=asynchronous)
    storm(engine, seed, extra={"slo_tpot_ms": 20})
    run = replay(read_log(tmp_path / "log"), detail=True)
    assert run.engine == "vllm"
    assert run.differences == []
    assert len(run.batches) == len(run.steps) > 100
    assert len(run.preemptions) == engine.preemptions
    finished = {record.id: record for record in run.records if record.ok}
    assert finished.keys() == {name for name in engine.finished if engine.generated(name)}
    assert {n: len(r.token_s) for n, r in finished.items()} == {n: engine.generated(n) for n in finished}
    assert all(abs(r.token_s[0] - engine.first_token[n]) < 1e-9 for n, r in finished.items())
    for name in finished:
        told = explain(run, name)
        assert told.ttft_s is not None
        assert abs(sum(one.seconds for one in told.to_first_token) - told.ttft_s) < 1e-6


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_logged_requests_are_simulated_in_vllm_as_it_ran(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    profile = TableSource(
        fingerprint="virtual",
        provenance="2 ms a step and 0.1 ms a row",
        tokens=((0, 2e-3), (4096, 2e-3 + 4096e-4)),
        chunks=((1, 0.0, 0.0), (4096, 0.0, 0.0)),
        decode=(0.0, 0.0, 0.0),
    )
    save(profile, tmp_path / "profile.json")
    settings = {"t_target_ms": 40, "profile": str(tmp_path / "profile.json")}
    engine = make(settings, asynchronous=asynchronous, batched_tokens=1024)
    monkeypatch.setattr(engine, "_cost_s", lambda output: 2e-3 + 1e-4 * output.total_num_scheduled_tokens)
    start = engine.now
    for i in range(40):
        engine.until(start + 0.15 * i)
        # It arrived while the last step was computed.
        now, engine.now = engine.now, start + 0.15 * i
        engine.add(f"r{i}", 6_000 if i % 10 == 3 else 200, 16)
        engine.now = now
    engine.run()
    report = calibrate(replay(read_log(tmp_path / "log")))
    assert report.profile["p90"] is not None
    assert report.profile["p90"] < 1e-6
    live, simulated = (run.to_json()["total"] for run in (report.measured, report.simulated))
    for metric, cut in (("ttft_s", "p50"), ("ttft_s", "p90"), ("tbt_s", "p50"), ("e2e_s", "p90")):
        assert simulated[metric][cut] == pytest.approx(live[metric][cut], rel=0.02)


def test_a_policy_that_was_made_anew_is_replayed_too(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make({"t_target_ms": 25}, blocks=600)
    plan, calls = type(engine.scheduler._headway).plan, 0

    def sometimes(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls in (20, 60):
            raise RuntimeError("a fault in the policy")
        return plan(*args)

    monkeypatch.setattr(type(engine.scheduler._headway), "plan", sometimes)
    storm(engine, 3, errors=2)
    monkeypatch.undo()
    run = replay(read_log(tmp_path / "log"))
    assert run.differences == []


def test_a_changed_decision_is_found(make: Make, tmp_path: Path) -> None:
    engine = make({"t_target_ms": 25})
    storm(engine, 4, requests=30)
    events = list(read_log(tmp_path / "log"))
    step = next(event for event in events[len(events) // 2 :] if event["event"] == "schedule" and event["quotas"])
    step["quotas"][0][1] += 1
    run = replay(events)
    assert len(run.differences) == 1
    assert f"step {step['id']} gave" in run.differences[0]


def test_the_log_can_be_drawn(make: Make, tmp_path: Path) -> None:
    engine = make({"t_target_ms": 25})
    storm(engine, 5, requests=20)
    drawn = engine_trace(read_log(tmp_path / "log")).events
    assert sum(event["ph"] == "X" for event in drawn) == sum(bool(tokens) for tokens in engine.log)
    assert {event["id"] for event in drawn if event["ph"] == "b"} == engine.arrived.keys()
    assert all(event["args"]["error"] != "unfinished" for event in drawn if event["ph"] == "e")


def test_the_script_for_other_versions_reads_the_digests_that_the_engine_compares() -> None:
    from vllm.v1.core.sched import scheduler

    path = Path(__file__).resolve().parents[3] / "scripts" / "check_vllm_version.py"
    digests_of = runpy.run_path(str(path))["digests_of"]
    assert digests_of(Path(scheduler.__file__).read_text())[0] == plugin.digests(scheduler.Scheduler)


def test_the_endpoint_is_a_plugin_that_vllm_takes() -> None:
    from vllm.plugins.endpoint_plugins.interface import EndpointPlugin

    assert isinstance(WhyEndpoint(), EndpointPlugin)
