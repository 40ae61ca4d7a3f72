"""When a policy is told that instances will be free: whatever waits there counts, wherever it waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from tests.helpers.cluster_worlds import cluster, scripted

from headway.core.request import Span
from headway.policy.iteration.config import SchedulerConfig
from headway.policy.placement.contract import (
    Action,
    ClusterSnapshot,
    CommitSpans,
    EnqueueRequest,
    RequestArrived,
    RequestPrefilled,
)
from headway.policy.placement.registry import PolicyContext, make_placement
from headway.sim.cluster.simulation import simulate_cluster
from headway.sim.cluster.state import ClusterSpec
from headway.sim.workload import TraceRequest


def chunked(spec: ClusterSpec, chunking: str, t_target_s: float) -> ClusterSpec:
    config = SchedulerConfig(policy="srpt", chunking=chunking, t_target_s=t_target_s)
    return replace(spec, engine=lambda group: replace(spec.engine(group), config=config))


def test_free_times_include_requests_queued_behind_a_ring() -> None:
    free: list[float] = []

    def arrived(event: RequestArrived, view: ClusterSnapshot) -> Sequence[Action]:
        free.append(view.instances[0].free_at_s - view.now_s)
        request = event.request
        if request.prompt_tokens > 1000:
            return [CommitSpans(request.id, (Span(request=request, start=0, end=4000, group=(0, 1)),), view.version)]
        return [EnqueueRequest(request.id, (0,), "prefill")]

    prompts = [TraceRequest(0.0, 4000, 1), *(TraceRequest(0.1 * k, 500, 1) for k in range(1, 6))]
    simulate_cluster(cluster(2), scripted(RequestArrived=arrived), prompts)
    steps = [b - a + 0.1 for a, b in pairwise(free[1:])]
    assert free[1] == pytest.approx(1.9)
    assert steps == pytest.approx([steps[0]] * 4)
    assert steps[0] > 0.005


def test_fifo_spreads_requests_queued_behind_a_ring_evenly() -> None:
    spec = cluster(4, per_node=4)
    placement = make_placement(
        "fifo", PolicyContext(latency=spec.spans, shape=spec.shape), {"long_tokens": 2000, "long_sp": 4}
    )
    prompts = [TraceRequest(0.0, 20_000, 1), *(TraceRequest(0.1 + 0.01 * k, 400, 1) for k in range(40))]
    result = simulate_cluster(spec, placement, prompts)
    assert [use.prefill_tokens for use in result.sim.replicas] == [4000] * 4


def test_a_span_is_planned_behind_the_prefill_backlog_of_schedulers() -> None:
    seen: list[float] = []

    def arrived(event: RequestArrived, view: ClusterSnapshot) -> Sequence[Action]:
        request = event.request
        if request.id == "r0":
            return [EnqueueRequest(request.id, (0,), "prefill")]
        seen.append(view.instances[0].free_at_s)
        if request.id == "r2":
            return [EnqueueRequest(request.id, (1,), "prefill")]
        return [CommitSpans(request.id, (Span(request=request, start=0, end=4000, group=(0, 1)),), view.version)]

    work = [TraceRequest(0.0, 8000, 1), TraceRequest(0.0, 4000, 1), TraceRequest(0.001, 10, 1)]
    result = simulate_cluster(chunked(cluster(2), "whole", 10.0), scripted(RequestArrived=arrived), work)
    alone_s, both_s = seen
    assert both_s == pytest.approx(alone_s + 2.0)
    assert result.sim.records[1].token_s[0] == pytest.approx(both_s, rel=0.01)


def test_free_times_count_only_the_rest_of_a_prompt() -> None:
    free: list[float] = []

    def prefilled(event: RequestPrefilled, view: ClusterSnapshot) -> Sequence[Action]:
        free.append(view.instances[0].free_at_s)
        return []

    policy = scripted(
        RequestArrived=lambda event, view: [EnqueueRequest(event.request.id, (0,), "prefill")],
        RequestPrefilled=prefilled,
    )
    shorts = [TraceRequest(0.05 * k, 10, 2) for k in range(1, 8)]
    world = chunked(cluster(1), "static:512", 0.055)
    simulate_cluster(world, policy, [TraceRequest(0.0, 16_384, 2), *shorts])
    assert len(free) == 8
    assert free[6] < free[0] + 0.1, "each short one that ends would else start the long one's clock anew"
