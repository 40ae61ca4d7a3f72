"""What placement policies make of a request's targets; instances' schedulers get them under all policies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest
from tests.controller.test_cluster_replay import OPTIONS, TRAFFIC, made
from tests.helpers.cluster_worlds import cluster, lines_into

from headway.core.request import Phase, Request, Slo
from headway.sim.cluster.simulation import simulate_cluster
from headway.sim.cluster.state import SimRequest
from headway.sim.metrics import SloTargets
from headway.sim.spec import RunSpec
from headway.sim.workload import TraceRequest

HEEDED = {"ladder", "pecsched", "priority"}


DENSE = [
    replace(request, arrival_s=request.arrival_s * 0.27, klass="short" if request.prompt_tokens < 300 else "long")
    for request in TRAFFIC
]


def decided(
    name: str,
    ttft_s: float | None,
    traffic: Sequence[TraceRequest] = TRAFFIC,
    classes: Sequence[str] = ("short", "long", ""),
) -> tuple[list[object], set[Slo]]:
    """Return a policy's actions, but for the requests in them, and the targets that schedulers were given."""
    lines: list[bytes] = []
    run = RunSpec(targets={klass: SloTargets(ttft_s=ttft_s) for klass in classes}, send_slo=True)
    seen: set[Slo] = set()
    spec = cluster(4, 0 if name == "jsq" else 2)
    result = simulate_cluster(spec, made(name), traffic, run, record=lines_into(lines))
    assert all(record.ok for record in result.sim.records)
    for line in map(msgspec.json.decode, lines):
        if line.get("of", [""])[0] == "RequestArrived":
            seen.add(msgspec.convert(line["of"][1]["request"]["slo"], Slo))
    return [line["actions"] for line in map(msgspec.json.decode, lines) if "actions" in line], seen


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_placements_that_keep_to_the_order_of_arrival_ignore_targets_and_the_others_do_not(name: str) -> None:
    """As docs/concepts/placement.md says."""
    without, none = decided(name, None)
    tight, given = decided(name, 0.05)
    lax, _ = decided(name, 60.0)
    assert (none, given) == ({Slo()}, {Slo(ttft_s=0.05)})
    assert (without == tight == lax) == (name not in HEEDED)


@pytest.mark.parametrize("name", sorted(HEEDED))
def test_a_tight_target_changes_what_is_decided_where_prompts_queue(name: str) -> None:
    """The long ones'."""
    assert decided(name, 0.05, DENSE, ["long"])[0] != decided(name, None, DENSE)[0]


@pytest.mark.parametrize("phase", ["all", "prefill", "decode"])
def test_an_instance_s_scheduler_gets_the_targets_in_every_phase(phase: Phase) -> None:
    slo = Slo(ttft_s=0.5, tbt_s=0.05)
    request = Request(id="r", arrival_s=0.0, prompt_tokens=100, max_output_tokens=8, slo=slo)
    waiting = SimRequest(request, TraceRequest(0.0, 100, 8))
    assert waiting.track_for(phase).request.slo == slo
