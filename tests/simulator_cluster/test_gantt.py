"""Pictures of cluster runs, from the command line and of the bars themselves."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.helpers.cluster_worlds import Scripted, cluster

from headway.cli.main import main
from headway.core.request import Span
from headway.policy.placement.contract import (
    Action,
    ClusterInstance,
    ClusterSnapshot,
    CommitSpans,
    EnqueueRequest,
    Event,
    RequestArrived,
)
from headway.sim.cluster.simulation import simulate_cluster
from headway.sim.cluster.state import GanttBar
from headway.sim.report.plots import gantt_figure
from headway.sim.workload import TraceRequest

SCENARIO = """
name: Tiny cluster
cluster:
  placement: tetris
  pools: [{role: prefill, count: 8}, {role: decode, count: 1, tp: 8}]
  spans: {source: tetris-table1}
workload: {qps: 4.0, requests: 6, mix: [{prompt: "uniform:8k-40k", output: "5"}]}
"""


def test_batches_of_a_prompt_and_then_of_decodes_without_a_break_are_a_bar_each() -> None:
    def decide(event: Event, view: ClusterSnapshot) -> list[Action]:
        if isinstance(event, RequestArrived) and event.request.id == "r0":
            return [EnqueueRequest("r0", (0,))]
        if isinstance(event, RequestArrived):
            return [CommitSpans("r1", (Span(request=event.request, start=0, end=100, group=(1, 2)),), view.version)]
        return []

    requests = [TraceRequest(0.0, 50, 20), TraceRequest(0.0, 100, 1)]
    result = simulate_cluster(cluster(), Scripted(decide), requests, keep_bars=True)
    prompt, decodes = [bar for bar in result.bars if bar.kind == "batch"]
    assert (prompt.instance, prompt.start_s, prompt.request) == (0, 0.0, "r0")
    assert (decodes.instance, decodes.start_s, decodes.request) == (0, prompt.end_s, "")
    assert decodes.end_s == result.sim.records[0].finish_s
    assert {bar[:4] for bar in result.bars if bar.kind == "span"} == {("span", 1, 0.0, 0.05), ("span", 2, 0.0, 0.05)}


def test_the_command_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scenario = tmp_path / "tiny.yaml"
    scenario.write_text(SCENARIO)
    assert main(["simulate", str(scenario), "--gantt", str(tmp_path / "out.png"), "--until", "1.5"]) == 0
    assert (tmp_path / "out.png").read_bytes()[:4] == b"\x89PNG"
    assert main(["simulate", str(scenario), "--gantt", str(tmp_path / "out.html")]) == 2
    assert "its name must end in .png" in capsys.readouterr().err
    plain = tmp_path / "plain.yaml"
    plain.write_text("workload: {qps: 1.0, requests: 1, mix: [{prompt: '5', output: '5'}]}\n")
    assert main(["simulate", str(plain), "--gantt", str(tmp_path / "x.png")]) == 2
    assert "no cluster.placement" in capsys.readouterr().err


def test_every_kind_of_bar_can_be_drawn_and_none_is_no_error() -> None:
    instances = [ClusterInstance(id=i, node=i) for i in range(2)]
    bars = [GanttBar(kind, 0, 0.0, 1.0, "r0", "x") for kind in ("span", "batch", "hold", "pause", "transfer")]
    for some in (bars, []):
        assert gantt_figure(some, instances, "t").axes
    named = [*bars, GanttBar("batch", 1, 0.0, 1.0, "")]
    (legend,) = gantt_figure(named, instances, "t", classes={"r0": "chat"}).legends
    assert [text.get_text() for text in legend.get_texts()] == ["chat", "decode", "reserved", "paused", "KV moves"]
