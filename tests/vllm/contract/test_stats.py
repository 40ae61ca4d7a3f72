"""What Headway's scheduler reports, from its steps to the text of `/metrics`."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.config", reason="vLLM is not in this environment: make test-vllm")

from prometheus_client import CollectorRegistry, generate_latest
from tests.vllm.contract.virtual_engine import VirtualEngine

from headway.runtime.cluster.http_server import parse_load
from headway.vllm import metrics

pytestmark = pytest.mark.long


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> VirtualEngine:
    monkeypatch.setattr(metrics.tempfile, "gettempdir", lambda: str(tmp_path))  # type: ignore[attr-defined]
    return VirtualEngine(asynchronous=True, settings={"t_target_ms": 30})


def test_latencies_that_requests_asked_for_are_counted(engine: VirtualEngine) -> None:
    engine.add("met", 200, 20, extra={"slo_ttft_ms": 5_000, "slo_tpot_ms": 500})
    engine.add("late", 20_000, 4, extra={"slo_ttft_ms": 10, "slo_tpot_ms": 1_000})
    engine.add("slow", 200, 20, extra={"slo_tpot_ms": 0.01})
    engine.add("indifferent", 200, 20)
    engine.add("gone", 200, 20, extra={"slo_ttft_ms": 10})
    engine.abort("gone")
    engine.run()
    engine.scheduler.schedule()
    assert dict(engine.scheduler.headway_stats.slo.counts) == {
        ("asked", "short"): 2,
        ("met", "short"): 1,
        ("missed", "short"): 1,
        ("missed_tpot", "short"): 1,
        ("asked", "long"): 1,
        ("missed", "long"): 1,
        ("missed_ttft", "long"): 1,
    }
    assert not engine.scheduler.headway_stats.slo._open


def test_metrics_of_a_server_come_from_the_scheduler(engine: VirtualEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    collector = metrics.SnapshotCollector()
    monkeypatch.setattr(metrics, "_COLLECTOR", collector)
    registry: Any = CollectorRegistry()
    monkeypatch.setattr(metrics, "REGISTRY", registry)
    config = engine.scheduler.vllm_config
    for _ in range(2):
        metrics.HeadwayStatLogger(config, 0)
    assert generate_latest(registry) == b""  # no snapshot yet
    engine.add("met", 200, 400, extra={"slo_ttft_ms": 5_000})
    engine.run()
    engine.until(engine.now + 2.0)
    engine.add("last", 200, 2)
    engine.run()
    name = metrics.model_name(config)
    text = generate_latest(registry).decode()
    assert f'model_name="{name}"' in text
    text = text.replace(f',model_name="{name}"', "")
    assert 'headway_slo_requests_met_total{class="short",engine="0"} 1.0' in text
    assert 'headway_policy_errors_total{engine="0"} 0.0' in text
    assert 'headway_decision_seconds{engine="0",quantile="0.5"}' in text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(values['headway_iterations_total{engine="0"}']) > 300
    assert float(values['headway_prediction_error_ratio{engine="0"}']) > 0
    load = parse_load(text)
    assert [tokens for tokens, _ in load.prefill_s] == [64, 256, 1024, 4096, 16384]
    assert all(0 < short < long for (_, short), (_, long) in pairwise(load.prefill_s))
    engine.scheduler.shutdown()
    assert generate_latest(registry) == b""


def test_metrics_of_the_last_second_are_there_when_all_requests_have_ended(engine: VirtualEngine) -> None:
    collector = metrics.SnapshotCollector()
    collector.paths[0] = metrics.snapshot_path(engine.scheduler.vllm_config, 0)
    engine.add("first", 200, 2)
    engine.run()
    engine.add("met", 200, 2, extra={"slo_ttft_ms": 5_000})
    engine.run()
    engine.scheduler.schedule()  # as vLLM's loop does for requests that have finished
    (slo,) = (one for one in collector.collect() if one.name == "headway_slo_requests_met")
    assert [(sample.labels["class"], sample.value) for sample in slo.samples] == [("short", 1.0)]
    engine.scheduler.shutdown()


def test_a_folder_that_cannot_be_written_costs_the_metrics_only(engine: VirtualEngine, tmp_path: Path) -> None:
    engine.scheduler._headway_snapshots = metrics.SnapshotFile(tmp_path / "none" / "headway.json")
    engine.add("chat", 200, 20)
    engine.run()
    assert engine.scheduler.headway_errors == 0
    assert not engine.scheduler._headway_snapshots.due(engine.now + 10)
