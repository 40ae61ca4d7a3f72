"""Prompts of several requests that are computed as one batch on a group."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from tests.helpers.cluster_worlds import PerToken, Scripted, cluster, scripted
from tests.helpers.unit_latency import small_machine

from headway.core.request import Request, Span
from headway.perf.hardware import LINKS
from headway.perf.latency.base import BatchLoad, load_s
from headway.perf.latency.groups import GroupShape, ShardedDecode, batch_s
from headway.policy.placement.contract import (
    Action,
    ActionRefused,
    ClusterSnapshot,
    CommitSpans,
    EnqueueRequest,
    KvReady,
    PreemptRequest,
    RequestArrived,
    RequestDropped,
    RequestFinished,
    SpanDone,
    TransferKv,
)
from headway.sim.cluster.simulation import simulate_cluster
from headway.sim.spec import RunSpec
from headway.sim.workload import TraceRequest


def together(requests: Sequence[Request], view: ClusterSnapshot, group: tuple[int, ...]) -> CommitSpans:
    spans = [Span(request=r, start=0, end=r.prompt_tokens, group=group) for r in requests]
    return CommitSpans(requests[0].id, (spans[0],), view.version, batched_with=tuple(spans[1:]))


def collecting(count: int, more: Sequence[Action] = ()) -> Scripted:
    """Waits for `count` requests, then computes them together on instances 0 and 1. They decode on the latter, or where
    `more` sends their KV."""
    there: list[Request] = []

    def arrived(event: RequestArrived, view: ClusterSnapshot) -> Sequence[Action]:
        there.append(event.request)
        return [together(there, view, (0, 1)), *more] if len(there) == count else []

    return scripted(
        RequestArrived=arrived,
        SpanDone=lambda event, view: [] if more else [EnqueueRequest(event.request, (1,), "decode")],
        KvReady=lambda event, view: [EnqueueRequest(event.request, (event.instance,), "decode")],
    )


def test_requests_of_a_batch_start_and_end_together_and_share_the_fixed_cost() -> None:
    policy = collecting(3)
    work = [TraceRequest(0.0, 1000, 1), TraceRequest(0.1, 400, 2), TraceRequest(0.2, 602, 1)]
    result = simulate_cluster(cluster(), policy, work, keep_bars=True)
    # a millisecond a token, two instances, and two of three single tokens saved
    assert policy.times(SpanDone) == pytest.approx([1.2] * 3)
    assert [r.token_s[0] for r in result.sim.records] == pytest.approx([1.2] * 3)
    assert [len(r.token_s) for r in result.sim.records] == [1, 2, 1]
    assert result.busy_s[0] == pytest.approx(1.0)
    assert result.spans == 1


def test_a_batch_goes_on_when_one_of_its_clients_leaves() -> None:
    for patience in (0.5, 0.75):  # both leave; the first alone; with the last one the batch ends
        policy = collecting(2)
        work = [TraceRequest(0.0, 1000, 1), TraceRequest(0.3, 1000, 1)]
        result = simulate_cluster(cluster(), policy, work, RunSpec(timeout_s=patience))
        assert policy.times(RequestDropped) == pytest.approx([patience, 0.3 + patience])
        assert result.busy_s[:2] == pytest.approx((patience, patience))
    policy = collecting(2)
    result = simulate_cluster(cluster(), policy, work, RunSpec(timeout_s=1.1))
    assert [r.error for r in result.sim.records] == ["timeout", None]
    assert policy.times(SpanDone) == pytest.approx([1.2995])


def test_a_batch_is_refused_as_a_whole_and_cannot_be_preempted() -> None:
    there: list[Request] = []

    def arrived(event: RequestArrived, view: ClusterSnapshot) -> Sequence[Action]:
        there.append(event.request)
        if len(there) == 1:
            return []
        twice = together([there[0], there[0]], view, (0, 1))
        apart = CommitSpans(
            there[0].id,
            (Span(request=there[0], start=0, end=100, group=(0,)),),
            view.version,
            batched_with=(Span(request=there[1], start=0, end=100, group=(1,)),),
        )
        return [twice, apart, together(there, view, (0, 1)), together(there, view, (0, 1)), PreemptRequest("r1")]

    policy = scripted(RequestArrived=arrived)
    result = simulate_cluster(cluster(), policy, [TraceRequest(0.0, 100, 1), TraceRequest(0.0, 100, 1)])
    refused = [event for _, event in policy.heard if isinstance(event, ActionRefused)]
    assert len(refused) == 4
    assert refused[-1].action == "preempt"
    assert len([1 for _, event in policy.heard if isinstance(event, RequestFinished)]) == 2
    assert result.refused == 4


def test_each_request_of_a_batch_is_transferred_by_itself() -> None:
    policy = collecting(2, [TransferKv("r0", 4, 0), TransferKv("r1", 5, 0)])
    work = [TraceRequest(0.0, 1000, 3), TraceRequest(0.0, 3000, 3)]
    result = simulate_cluster(cluster(decode=2), policy, work)
    assert {(e.request, e.instance) for _, e in policy.heard if isinstance(e, KvReady)} == {("r0", 4), ("r1", 5)}
    assert [len(r.token_s) for r in result.sim.records] == [3, 3]


def test_the_time_of_a_batch_has_the_fixed_cost_once() -> None:
    group = GroupShape(2)
    assert batch_s(PerToken(), [(0, 1000)], group) == pytest.approx(0.5)
    assert batch_s(PerToken(), [(0, 1000), (0, 500)], group) == pytest.approx(0.7495)
    assert batch_s(PerToken(), [], group) == 0.0


def test_masters_divide_the_rows_of_linear_layers() -> None:
    member, link = small_machine(), LINKS["nvlink3"]
    one, all_four = (ShardedDecode(member, 4, 32, link, masters) for masters in (1, 4))
    load = BatchLoad(64, 64, 64_000)
    assert load_s(all_four, load) < load_s(one, load)
    assert np.array_equal(all_four.token_s(1, 9), member.token_s(1, 3)[[0, 0, 0, 0, 1, 1, 1, 1, 2]])
    assert load_s(all_four, BatchLoad(1, 1, 1000)) == load_s(one, BatchLoad(1, 1, 1000))
