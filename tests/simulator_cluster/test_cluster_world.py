"""The cluster's event loop: spans take their turn, pauses keep work, schedulers run inside, transfers are limited."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from tests.helpers.cluster_worlds import PerToken, cluster, scripted

from headway.core.request import Span
from headway.policy.placement.contract import (
    Action,
    ActionRefused,
    ClusterSnapshot,
    CommitSpans,
    EnqueueRequest,
    HoldGranted,
    HoldGroup,
    KvReady,
    PreemptRequest,
    RejectRequest,
    ReleaseGroup,
    RequestArrived,
    ResumeRequest,
    SpanDone,
    SpanPaused,
    SpanProgress,
    TransferKv,
)
from headway.policy.placement.registry import PolicyContext, make_placement
from headway.sim.cluster.simulation import simulate_cluster
from headway.sim.spec import RunSpec
from headway.sim.workload import TraceRequest


def whole(event: RequestArrived, view: ClusterSnapshot, group: tuple[int, ...]) -> CommitSpans:
    request = event.request
    return CommitSpans(
        request.id, (Span(request=request, start=0, end=request.prompt_tokens, group=group),), view.version
    )


def test_spans_queue_in_order_and_free_times_are_absolute() -> None:
    seen: list[tuple[float, ...]] = []

    def arrived(event: RequestArrived, view: ClusterSnapshot) -> Sequence[Action]:
        seen.append(tuple(i.free_at_s for i in view.instances))
        return [whole(event, view, (0, 1) if event.request.id == "r0" else (1, 2))]

    policy = scripted(RequestArrived=arrived)
    requests = [TraceRequest(0.0, 2000, 1), TraceRequest(0.5, 1000, 1), TraceRequest(0.7, 10, 1)]
    result = simulate_cluster(cluster(), policy, requests)
    assert policy.times(SpanDone) == pytest.approx([1.0, 1.5, 1.505])
    assert seen[1] == pytest.approx((1.0, 1.0, 0.0, 0.0))
    assert seen[2] == pytest.approx((1.0, 1.5, 1.5, 0.0))
    assert [r.token_s[0] for r in result.sim.records] == pytest.approx([1.0, 1.5, 1.505])
    assert result.busy_s == pytest.approx((1.0, 1.505, 0.505, 0.0))


@pytest.mark.parametrize(("rows", "at_s", "where"), [(0, 0.45, SpanProgress(0, 9)), (400, 0.425, SpanProgress(800, 2))])
def test_a_preempted_span_keeps_its_layers_and_queued_work_goes_first(
    rows: int, at_s: float, where: SpanProgress
) -> None:
    """Of 32 layers in 1.6 s the ninth is under way at 0.42 s; where it is cut into four, the second one's second."""

    def arrived(event: RequestArrived, view: ClusterSnapshot) -> Sequence[Action]:
        if event.request.id == "r0":
            return [whole(event, view, (0, 1))]
        return [PreemptRequest("r0"), EnqueueRequest(event.request.id, (0,), "prefill", concurrent=False)]

    policy = scripted(
        RequestArrived=arrived,
        RequestFinished=lambda event, view: [ResumeRequest("r0")] if event.request == "r1" else [],
    )
    requests = [TraceRequest(0.0, 3200, 1), TraceRequest(0.42, 100, 1)]
    result = simulate_cluster(replace(cluster(), rows=rows), policy, requests)
    (paused,) = [event for _, event in policy.heard if isinstance(event, SpanPaused)]
    assert paused.progress == where
    assert policy.times(SpanPaused) == pytest.approx([at_s])
    first = result.sim.records[1].token_s[0]
    assert result.sim.records[0].token_s[0] == pytest.approx(1.6 + first - at_s)
    assert result.paused == 1


@pytest.mark.parametrize("sends_layers", [True, False])
def test_disaggregated_prefill_moves_kv_and_decodes_elsewhere(sends_layers: bool) -> None:
    policy = scripted(
        RequestArrived=lambda event, view: [EnqueueRequest(event.request.id, (0,), "prefill")],
        RequestPrefilled=lambda event, view: [TransferKv(event.request, 2, overlapped=True)],
        KvReady=lambda event, view: [EnqueueRequest(event.request, (event.instance,), "decode")],
    )
    spec = replace(cluster(2, decode=1), sends_layers=sends_layers)
    result = simulate_cluster(spec, policy, [TraceRequest(0.0, 1000, 4)])
    (record,) = result.sim.records
    assert record.ok
    assert len(record.token_s) == 4
    # the last layer alone, or all of them
    left_s = 1000 * 131072 / (32 if sends_layers else 1) / 1e9
    assert policy.times(KvReady)[0] == pytest.approx(record.token_s[0] + left_s, rel=1e-3)
    assert result.sim.replicas[2].decode_tokens + result.sim.replicas[2].prefill_tokens == 3


def test_kv_sent_during_compute_arrives_after_the_last_layer() -> None:
    policy = scripted(
        RequestArrived=lambda event, view: [whole(event, view, (0, 1)), TransferKv(event.request.id, 2, index=0)],
        KvReady=lambda event, view: [EnqueueRequest(event.request, (2,), "decode")],
    )
    (record,) = simulate_cluster(cluster(2, decode=1), policy, [TraceRequest(0.0, 1000, 2)]).sim.records
    layer_s = 500 * 131072 / 32 / 1e9
    assert record.token_s[0] == pytest.approx(0.5)
    assert policy.times(KvReady) == pytest.approx([0.5 + layer_s])


def test_a_request_keeps_its_place_at_the_receiver_between_two_chunks() -> None:
    """Tetris §4.2. r1's first chunk is sent by 0.5 s; its second begins at 2 s, where r0 ends. r2 and r3 come between,
    and the one receive backend is r2's until 2.1 s."""
    spans = {
        "r0": [(0, 2000, (1,))],
        "r1": [(0, 500, (0,)), (500, 1500, (1,))],
        "r2": [(0, 1500, (0,))],
        "r3": [(0, 1500, (2,))],
    }

    def arrived(event: RequestArrived, view: ClusterSnapshot) -> Sequence[Action]:
        request, to = event.request, 4
        mine = tuple(Span(request=request, start=a, end=b, group=group) for a, b, group in spans[request.id])
        sends = [TransferKv(request.id, to, index) for index in range(len(mine))] if request.id != "r0" else []
        return [CommitSpans(request.id, mine, view.version), *sends]

    policy = scripted(RequestArrived=arrived)
    arrivals = [TraceRequest(at, sum(b - a for a, b, _ in parts), 2) for at, parts in zip(
        (0.0, 0.0, 0.6, 0.7), spans.values(), strict=True)]  # fmt: skip
    simulate_cluster(cluster(4, decode=1, backends=1), policy, arrivals, RunSpec(window_s=20.0))
    assert [event.request for _, event in policy.heard if isinstance(event, KvReady)] == ["r2", "r1", "r3"]


def test_a_span_waits_for_idle_schedulers_and_later_requests_queue_behind_it() -> None:
    def arrived(event: RequestArrived, view: ClusterSnapshot) -> Sequence[Action]:
        return [whole(event, view, (0,)) if event.request.id == "r1" else EnqueueRequest(event.request.id, (0,))]

    requests = [TraceRequest(0.0, 100, 200), TraceRequest(0.01, 1000, 1), TraceRequest(0.02, 100, 2)]
    result = simulate_cluster(cluster(), scripted(RequestArrived=arrived), requests)
    chat, document, late = result.sim.records
    assert document.scheduled_s == chat.finish_s
    assert late.scheduled_s == document.finish_s


def test_holds_are_granted_whole_and_refused_commits_change_nothing() -> None:
    def arrived(event: RequestArrived, view: ClusterSnapshot) -> Sequence[Action]:
        if event.request.id == "r0":
            return [whole(event, view, (0,)), HoldGroup("x", (0, 1))]
        stale = whole(event, view, (0, 1))
        return [CommitSpans(stale.request, stale.spans, version=0), whole(event, view, (1,))]

    def granted(event: HoldGranted, view: ClusterSnapshot) -> Sequence[Action]:
        policy.wake_s = view.now_s + 2.0
        return []

    policy = scripted(RequestArrived=arrived, HoldGranted=granted, WakeupDue=lambda *_: [ReleaseGroup("x")])
    result = simulate_cluster(
        cluster(), policy, [TraceRequest(0.0, 1000, 1), TraceRequest(0.1, 1000, 1)], keep_bars=True
    )
    assert policy.times(HoldGranted) == pytest.approx([1.0])
    (refused,) = [event for _, event in policy.heard if isinstance(event, ActionRefused)]
    assert (refused.request, refused.action) == ("r1", "commit")
    assert "changed since version 0" in refused.why
    assert result.sim.records[1].scheduled_s == pytest.approx(3.0)
    assert {(bar.instance, bar.start_s, bar.end_s) for bar in result.bars if bar.kind == "hold"} == {
        (0, 1.0, 3.0),
        (1, 1.0, 3.0),
    }


def test_rejections_and_windows_are_accounted_for() -> None:
    def arrived(event: RequestArrived, view: ClusterSnapshot) -> Sequence[Action]:
        return [RejectRequest("r0", "too long")] if event.request.id == "r0" else [whole(event, view, (0,))]

    policy = scripted(RequestArrived=arrived)
    result = simulate_cluster(
        cluster(), policy, [TraceRequest(0.0, 10, 1), TraceRequest(0.0, 5000, 1)], RunSpec(window_s=2.0)
    )
    assert [record.error for record in result.sim.records] == ["rejected: too long", "unfinished"]
    assert result.busy_s[0] == pytest.approx(2.0)


def test_fast_forward_changes_nothing_but_time() -> None:
    requests = [TraceRequest(0.013 * i, 1000 if i % 7 == 3 else 50 + i, 40) for i in range(60)]
    spec = cluster()
    runs = []
    for fast in (True, False):
        context = PolicyContext(latency=PerToken(), shape=spec.shape)
        policy = make_placement("fifo", context, {"long_tokens": 900, "long_sp": 2})
        runs.append(simulate_cluster(spec, policy, requests, RunSpec(fast_forward=fast)).sim)
    assert all(record.ok for record in runs[0].records)
    for one, other in zip(runs[0].records, runs[1].records, strict=True):
        assert one.token_s == pytest.approx(other.token_s)
    assert runs[0].replicas[0].batches < runs[1].replicas[0].batches
