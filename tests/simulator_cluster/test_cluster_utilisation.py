"""MFU and MBU of simulated clusters: all work is counted, and once, however spans are cut and paused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from headway.perf.utilisation import UtilisationBase
from headway.sim.build import requests_of
from headway.sim.cluster.build import cluster_of, run_cluster
from headway.sim.cluster.state import ClusterResult
from headway.sim.scenario import Scenario, parse_scenario
from headway.sim.sweep import with_field

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def scenario(name: str, **fields: Any) -> Scenario:
    data = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text())
    for field, value in fields.items():
        data = with_field(data, field.replace("__", "."), value)
    return parse_scenario(data)


def base_of(data: Scenario) -> UtilisationBase:
    base = cluster_of(data, requests_of(data.workload, data.run.window_s, 0)).utilisation_base
    assert base is not None
    return base


def needed_flops(result: ClusterResult, base: UtilisationBase) -> float:
    """What prompts and answers of a run need, computed once each; an answer's last token is not computed on."""
    total = 0.0
    for record in result.sim.records:
        rows = record.prompt_tokens + record.output_tokens - 1
        total += base.shape.linear_flops(rows) + base.shape.pairs_flops(rows * (rows + 1) / 2)
    return total


CASES = {
    "chunks on groups": ("cluster-tetris", {"workload__requests": 40}),
    "paused at layers": ("cluster-pecsched", {"workload__requests": 800}),
    "paused between pieces": ("cluster-pecsched", {"workload__requests": 800, "cluster__span_rows": 512}),
    "queues in front of engines": ("cluster-fifo", {"workload__requests": 60}),
}


@pytest.mark.parametrize(("name", "fields"), CASES.values(), ids=CASES)
def test_the_flops_of_a_cluster_are_those_of_its_requests(name: str, fields: dict[str, Any]) -> None:
    data = scenario(name, **fields)
    result, base = run_cluster(data, 0), base_of(data)
    assert all(record.ok for record in result.sim.records)
    assert (result.paused > 0) == (name == "cluster-pecsched")
    assert result.sim.mfu is not None
    done = result.sim.mfu * result.sim.duration_s * base.peak_flops * len(result.instances)
    # An instance that takes over a decode computes the prompt's last token again.
    assert done == pytest.approx(needed_flops(result, base), rel=0.02)


def test_the_bytes_of_a_cluster_hold_its_weights_and_what_decodes_read() -> None:
    data = scenario("cluster-tetris", workload__requests=40)
    result, base = run_cluster(data, 0), base_of(data)
    assert result.sim.mbu is not None
    read = result.sim.mbu * result.sim.duration_s * base.peak_bandwidth * len(result.instances)
    weights = base.shape.parameters * base.shape.dtype_bytes
    iterations = sum(use.iterations for use in result.sim.replicas)
    kv_tokens = sum(r.output_tokens * r.prompt_tokens for r in result.sim.records)
    assert read > weights * (iterations + result.spans) + kv_tokens * base.shape.kv_bytes_per_token
    assert 0 < result.sim.mbu < 1


def test_the_peak_of_an_instance_is_the_mean_over_pools_of_different_sizes() -> None:
    base = base_of(scenario("cluster-tetris", workload__requests=4))
    one = base_of(scenario("cluster-tetris", workload__requests=4, cluster__pools=[{"role": "mixed", "count": 4}]))
    # 16 instances of one accelerator and two of eight.
    assert base.peak_flops == pytest.approx(one.peak_flops * 32 / 18)
