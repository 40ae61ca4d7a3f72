"""PecSched and its peers on the cluster simulator, where every instance runs its own scheduler."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.cluster_worlds import PerToken, cluster
from tests.helpers.marks import quick_first
from tests.helpers.unit_latency import small_machine

from headway.perf.latency.groups import GroupShape
from headway.policy.placement.registry import PolicyContext, make_placement
from headway.sim.cluster.simulation import simulate_cluster
from headway.sim.cluster.state import ClusterResult
from headway.sim.spec import RunSpec
from headway.sim.workload import TraceRequest

LONG = {"long_tokens": 1000, "long_sp": 3}
PECSCHED = {**LONG, "long_replicas": "fixed", "batch_tokens": 500}
ABLATIONS = ("preempt", "disaggregate", "colocate", "fast_sp")


def work(seed: int, count: int = 50) -> list[TraceRequest]:
    rng, at, made = random.Random(seed), 0.0, []
    for _ in range(count):
        at += rng.expovariate(1 / rng.choice((0.01, 0.1, 0.6)))
        long = rng.random() < 0.15
        prompt = rng.randint(1001, 6000) if long else rng.randint(1, 300)
        made.append(TraceRequest(at, prompt, rng.randint(1, 40), klass="long" if long else "short"))
    return made


def run(name: str, options: dict[str, Any], requests: list[TraceRequest], instances: int = 6) -> ClusterResult:
    apart = name == "pecsched" and options.get("disaggregate", True)
    spec = cluster(instances - apart, decode=int(apart))
    placement = make_placement(name, PolicyContext(latency=spec.spans, shape=spec.shape), options)
    return simulate_cluster(spec, placement, requests, RunSpec(), keep_bars=True)


def check(result: ClusterResult, requests: list[TraceRequest]) -> None:
    """Check that all output came, each token once and in order; that each long prefill was computed once, as a whole;
    and that no two spans ran on an instance at the same time."""
    for record, request in zip(result.sim.records, requests, strict=True):
        assert record.ok, record
        assert record.output_tokens == request.output_tokens
        assert list(record.token_s) == sorted(record.token_s)
    spans = defaultdict(list)
    worked: dict[tuple[str, int], float] = defaultdict(float)
    for bar in result.bars:
        if bar.kind == "span":
            spans[bar.instance].append((bar.start_s, bar.end_s))
            worked[bar.request, bar.instance] += bar.end_s - bar.start_s
    for times in spans.values():
        assert all(one[1] <= other[0] + 1e-9 for one, other in itertools.pairwise(sorted(times)))
    for (name, _), seconds in worked.items():
        tokens = requests[int(name[1:])].prompt_tokens
        # on each instance: a group computes in lockstep, and no pause repeats work
        assert seconds == pytest.approx(PerToken().prefill_s(0, tokens, GroupShape(3)))


@settings(max_examples=25)
@given(
    st.integers(0, 10**6),
    st.sampled_from(["paper", "default"]),
    st.sets(st.sampled_from(ABLATIONS), max_size=2),
    st.sampled_from([None, 0.0, 0.5]),
)
def test_no_token_is_lost_or_repeated(seed: int, mode: str, without: set[str], ageing: float | None) -> None:
    options = {**PECSCHED, "mode": mode, "ageing": ageing, **dict.fromkeys(without, False)}
    requests = work(seed)
    check(run("pecsched", options, requests), requests)


PEERS: list[tuple[str, dict[str, Any]]] = [
    ("reservation", {}),
    ("reservation", {"borrow": True}),
    ("priority", {}),
    ("priority", {"concurrent": True}),
]


@settings(max_examples=20)
@given(st.integers(0, 10**6), st.sampled_from(PEERS))
def test_reservation_and_priority_lose_no_token(seed: int, peer: tuple[str, dict[str, Any]]) -> None:
    requests = work(seed)
    check(run(peer[0], {**LONG, **peer[1]}, requests), requests)


def test_long_decode_is_paused_only_without_colocation() -> None:
    shorts = [TraceRequest(1.5 + i * 0.0015, 200, 1) for i in range(60)]
    requests = [TraceRequest(0.0, 3000, 400, klass="long"), *shorts]
    beside = run("pecsched", PECSCHED, requests, instances=4)
    instead = run("pecsched", {**PECSCHED, "colocate": False}, requests, instances=4)
    for result in (beside, instead):
        check(result, requests)
    # a decode that is paused shows as a gap between two of its tokens: a stream of short prompts, not one batch
    gaps = [max(b - a for a, b in itertools.pairwise(r.sim.records[0].token_s)) for r in (beside, instead)]
    assert gaps[1] > 3 * gaps[0]
    assert beside.sim.records[1].token_s[0] < 2.0


def test_a_long_decode_and_short_prefills_on_the_same_replicas_cost_each_other() -> None:
    """PecSched Fig. 7: one fused batch. The prefill's iteration reads the long request's KV too, and its token comes at
    the end of that iteration; beside no prefill both are as fast as alone."""
    long, shorts = TraceRequest(0.0, 3000, 400, klass="long"), [TraceRequest(1.5, 400, 1, klass="short")] * 3
    works = ([long], shorts, [long, *shorts])
    alone, fast, both = (run("pecsched", PECSCHED, requests, instances=4).sim.records for requests in works)
    latency = small_machine()
    step_s = alone[0].token_s[200] - alone[0].token_s[199]
    gaps = [b - a for a, b in itertools.pairwise(both[0].token_s)]
    iteration_s = min(record.token_s[0] - 1.5 for record in both[1:])
    assert iteration_s > min(record.token_s[0] - 1.5 for record in fast) + latency.decode_s(1, 1000)
    # the shorts wait for the end of the decode's iteration under way when they come
    assert iteration_s - step_s <= max(gaps) <= iteration_s
    assert max(gaps) > 3 * step_s
    assert sorted(gaps)[len(gaps) // 2] == pytest.approx(step_s, rel=1e-3)


def test_reservation_separates_short_and_long_requests() -> None:
    requests = [TraceRequest(0.1 * i, 200, 2, klass="short") for i in range(20)]
    paper = {**LONG, "mode": "paper"}
    with_longs = [*requests, TraceRequest(0.05, 3000, 5, klass="long")]
    result = run("reservation", paper, with_longs)
    spans = {bar.instance for bar in result.bars if bar.kind == "span"}
    shorts = {i for i, use in enumerate(result.sim.replicas) if use.prefill_tokens > 10}
    assert len(spans) == 3
    assert not spans & shorts


def test_reservation_of_all_instances_is_refused() -> None:
    with pytest.raises(Exception, match="short requests need at least one"):
        run("reservation", {**LONG, "reserved": 6}, work(0))


def starved(name: str, options: dict[str, Any], load: float) -> float:
    """Return the share of long requests that never ran, of those that arrived in the first half of 16 s. Six instances;
    short prompts of 500 tokens take 11.5 ms each. A long one takes 0.4 s of five instances, one every two seconds."""
    rng, at, requests = random.Random(1), 0.0, []
    while (at := at + rng.expovariate(6 * load / 0.0115)) < 16.0:
        requests.append(TraceRequest(at, 500, 1, klass="short"))
    requests += [TraceRequest(2.0 * i, 2000, 1, klass="long") for i in range(4)]
    spec = cluster(6)
    placement = make_placement(name, PolicyContext(latency=spec.spans, shape=spec.shape), options)
    result = simulate_cluster(spec, placement, requests, RunSpec(window_s=16.0))
    longs = [record for record in result.sim.records if record.klass == "long"]
    return sum(record.scheduled_s is None or record.finish_s is None for record in longs) / len(longs)


@pytest.mark.parametrize("never", quick_first([{"mode": "paper"}, {"promote": "off"}]))
def test_priority_promotes_long_requests_that_have_waited_for_too_long(never: dict[str, Any]) -> None:
    """FastServe's remedy (§3.2), beside the paper's own set-up, in which they starve."""
    assert starved("priority", {**LONG, "long_sp": 5, **never}, 1.1) >= 0.75
    assert starved("priority", {**LONG, "long_sp": 5}, 1.1) == 0.0


def test_reservation_lends_idle_instances_unless_it_is_the_paper_s() -> None:
    requests = [TraceRequest(0.001 * i, 200, 2, klass="short") for i in range(20)]
    used = {
        mode: sum(use.prefill_tokens > 0 for use in run("reservation", {**LONG, "mode": mode}, requests).sim.replicas)
        for mode in ("paper", "default")
    }
    assert used == {"paper": 3, "default": 6}


@pytest.mark.long
def test_ageing_lets_long_requests_run_that_starve_without_it() -> None:
    """The load of short requests alone is 1.1 times the capacity of six instances."""
    pecsched = {**PECSCHED, "long_sp": 5, "disaggregate": False}
    assert starved("pecsched", {**pecsched, "ageing": "off"}, 1.1) >= 0.75
    assert starved("pecsched", pecsched, 1.1) == 0.0
