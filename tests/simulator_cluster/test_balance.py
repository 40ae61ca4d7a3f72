"""What spreading earlier chunks' KV over a larger group costs (Tetris §4.1): bytes, and what overlap does not hide."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.cluster_worlds import LINK, PerToken, Scripted, cluster

from headway.core.request import Span
from headway.perf.hardware import NetworkLink, model
from headway.policy.placement.contract import CommitSpans, RequestArrived
from headway.sim.cluster.backend import CONNECTED_SHARE, balance_bytes, exposed_s
from headway.sim.cluster.simulation import simulate_cluster
from headway.sim.cluster.state import ClusterSpec
from headway.sim.workload import TraceRequest

SHAPE = model("llama-3-8b")
FAST = NetworkLink(name="fast", bytes_per_s=1e12, latency_s=0.0, source="test", efficiency=1.0)


def test_balancing_gives_every_instance_an_equal_share_of_kv() -> None:
    whole = 8000 * SHAPE.kv_bytes_per_token
    assert balance_bytes(SHAPE, 8000, 2, 8) == whole / 8
    assert balance_bytes(SHAPE, 8000, 8, 8) == 0.0
    assert balance_bytes(SHAPE, 0, 2, 8) == 0.0


def test_only_the_first_layer_is_exposed_where_compute_outlasts_transfers() -> None:
    count = balance_bytes(SHAPE, 8000, 4, 8)
    layer_s = FAST.transfer_s(int(count / SHAPE.layers))
    assert exposed_s(SHAPE, FAST, 8000, 4, 8, chunk_s=1.0) == pytest.approx(layer_s)
    slow_s = LINK.transfer_s(int(count / SHAPE.layers))
    chunk_s = SHAPE.layers * slow_s / 10
    expected = slow_s + (SHAPE.layers - 1) * (slow_s - CONNECTED_SHARE * chunk_s / SHAPE.layers)
    assert exposed_s(SHAPE, LINK, 8000, 4, 8, chunk_s) == pytest.approx(expected)


@settings(max_examples=200, derandomize=True, deadline=None)
@given(st.integers(1, 200_000), st.integers(1, 16), st.integers(1, 16), st.floats(1e-3, 10.0))
def test_exposed_time_is_at_most_the_transfer_and_falls_with_the_chunk_length(
    past: int, before: int, more: int, chunk_s: float
) -> None:
    after = before + more
    per_sender = balance_bytes(SHAPE, past, before, after) * max(1.0, more / before)
    cost = exposed_s(SHAPE, LINK, past, before, after, chunk_s)
    assert 0.0 < cost <= LINK.transfer_s(int(per_sender)) * (1 + 1e-6) + 1e-6
    assert exposed_s(SHAPE, LINK, past, before, after, 2 * chunk_s) <= cost


def test_balancing_is_added_to_the_time_of_a_later_chunk() -> None:
    def ttft_s(spec: ClusterSpec) -> float:
        def decide(event, view):  # type: ignore[no-untyped-def]
            if not isinstance(event, RequestArrived):
                return []
            request = event.request
            spans = (
                Span(request=request, start=0, end=2000, group=(0,)),
                Span(request=request, start=2000, end=6000, group=(0, 1)),
            )
            return [CommitSpans(request.id, spans, view.version)]

        result = simulate_cluster(spec, Scripted(decide), [TraceRequest(0.0, 6000, 1)])
        return result.sim.records[0].token_s[0]

    without, within = ttft_s(cluster(2)), ttft_s(cluster(2, balance=True))
    assert isinstance(cluster(2).spans, PerToken)
    assert without == pytest.approx(4.0)
    assert within - without == pytest.approx(exposed_s(SHAPE, LINK, 2000, 1, 2, 2.0))
    assert ttft_s(replace(cluster(2, balance=True), balance=False)) == without
