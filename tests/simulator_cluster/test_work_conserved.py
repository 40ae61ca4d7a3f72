"""No instance idles while work that could run there waits: a span begins the moment that it can, and never before."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.cluster_worlds import cluster

from headway.perf.latency.eq1 import Eq1Coefficients, Eq1Latency
from headway.policy.placement.registry import PolicyContext, make_placement
from headway.sim.cluster.simulation import simulate_cluster
from headway.sim.spec import NoiseSpec, RunSpec
from headway.sim.workload import TraceRequest

LATENCY = Eq1Latency({s: Eq1Coefficients(5e-3 * s, 1e-3 / s, 4e-8 / s, 2e-8 / s) for s in (1, 2, 4, 8)}, "test")
ARRIVALS = st.lists(st.tuples(st.floats(0.0, 1.5), st.integers(50, 9000)), min_size=1, max_size=30)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(ARRIVALS, st.sampled_from(["tetris", "fixed-sp", "context-parallel"]), st.sampled_from([0.0, 0.3]))
def test_spans_begin_as_soon_as_they_can(arrivals: list[tuple[float, int]], name: str, noise: float) -> None:
    """Predicted and real times differ under noise; the order in which spans take turns does not."""
    at, work = 0.0, []
    for gap_s, tokens in arrivals:
        at += gap_s
        work.append(TraceRequest(at, tokens, 1))
    spec = cluster(8, per_node=4)
    options = {"tetris": {"rate": 0.05}, "fixed-sp": {"sp": 4}}.get(name, {})
    placement = make_placement(name, PolicyContext(latency=LATENCY, shape=spec.shape), options)
    how = RunSpec(noise=NoiseSpec(kind="lognormal", amount=noise) if noise else NoiseSpec())
    result = simulate_cluster(spec, placement, work, how, keep_bars=True)
    spans: dict[tuple[int, int], tuple[float, float, set[int]]] = {}
    for bar in result.bars:
        key = int(bar.request[1:]), int(bar.note.split(":")[0])
        spans.setdefault(key, (bar.start_s, bar.end_s, set()))[2].add(bar.instance)
    free = [0.0] * 8
    before = (-1, 0.0)
    tokens = dict.fromkeys(range(len(work)), 0)  # type: ignore[assignment]
    for (request, _), (start_s, end_s, group) in sorted(spans.items()):
        ready_s = before[1] if before[0] == request else work[request].arrival_s
        assert start_s == pytest.approx(max(ready_s, *(free[i] for i in group)), abs=1e-9)
        for i in group:
            free[i] = end_s
        before = (request, end_s)
        tokens[request] += 1  # type: ignore[index]
    assert all(record.ok for record in result.sim.records)
    assert all(tokens.values())  # type: ignore[attr-defined]
