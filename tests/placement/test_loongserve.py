"""LoongServe as a policy: rounds, scale-down and scale-up of groups, migration, pools, and no token lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.cluster_worlds import TETRIS_CONTEXT, Scripted, cluster

from headway.core.errors import ConfigError
from headway.core.request import Request
from headway.perf.hardware import LINKS
from headway.perf.latency.groups import GroupShape
from headway.policy.placement.contract import (
    Action,
    ClusterInstance,
    ClusterLinks,
    ClusterSnapshot,
    ClusterState,
    CommitSpans,
    EnqueueRequest,
    Event,
    KvReady,
    PreemptRequest,
    RequestArrived,
    RequestFinished,
    TransferKv,
)
from headway.policy.placement.registry import PolicyContext, make_placement
from headway.sim.cluster.simulation import simulate_cluster
from headway.sim.cluster.state import ClusterResult, ClusterSpec
from headway.sim.spec import NoiseSpec, RunSpec
from headway.sim.workload import TraceRequest
from headway_research.loongserve.batching import LoongServeOptions
from headway_research.loongserve.policy import GreedyDispatch, LoongServe, loongserve

DEFAULT = RunSpec()
WAIT = {"wait_steps": 1, "decode_step_s": 0.01}


class LinearGroupLatency:
    """0.1 ms a token, over the group's size, and 5 ms an instance."""

    source = "test"

    def prefill_s(self, past: int, tokens: int, group: GroupShape) -> float:
        return 0.005 * group.sp + tokens * 1e-4 / group.sp

    def solve_tokens(self, past: int, budget_s: float, group: GroupShape) -> int:
        raise NotImplementedError


class Watched(Scripted):
    """A LoongServe policy whose invariants are checked after every event; `done` records its actions."""

    def __init__(self, policy: LoongServe) -> None:
        super().__init__(self._decide)
        self.policy = policy
        self.done: list[tuple[float, Action]] = []

    def _decide(self, event: Event, view: ClusterSnapshot) -> Sequence[Action]:
        actions = list(self.policy.on_event(event, view))
        self.done += [(view.now_s, action) for action in actions]
        for pool in self.policy.pools:
            groups = [p.group for p in pool.prefills] + [b.group for b in pool.decodes if not b.paused]
            flat = [i for group in groups for i in group]
            assert len(flat) == len(set(flat)), "an instance works for two batches"
            assert set(flat) <= set(pool.ids)
            names = [r.id for r in pool.pending]
            names += [name for p in pool.prefills for name in p.unfinished]
            names += [name for b in pool.decodes for name in b.members]
            assert len(names) == len(set(names)), "a request is in two places"
            busy = pool.prefills or pool.decodes or any(b.migrating for b in pool.decodes)
            assert busy or not pool.pending, "prompts wait and nothing runs"
        return actions

    def next_wakeup(self, now: float) -> float | None:
        return self.policy.next_wakeup(now)

    def of(self, kind: type) -> list[Any]:
        return [action for _, action in self.done if type(action) is kind]


def world(count: int = 4, **more: Any) -> ClusterSpec:
    return replace(cluster(count), spans=LinearGroupLatency(), **more)


def run(
    spec: ClusterSpec, work: Sequence[TraceRequest], how: RunSpec = DEFAULT, **options: Any
) -> tuple[Watched, ClusterResult]:
    made = loongserve(PolicyContext(latency=spec.spans, shape=spec.shape), LoongServeOptions(**options))
    assert isinstance(made, LoongServe)
    watched = Watched(made)
    return watched, simulate_cluster(spec, watched, work, how)


def test_prompt_uses_all_helpful_instances_and_decodes_on_the_fewest() -> None:
    policy, result = run(world(), [TraceRequest(0.0, 8000, 20)])
    (commit,) = policy.of(CommitSpans)
    assert commit.spans[0].group == (0, 1, 2, 3)
    (enqueue,) = policy.of(EnqueueRequest)
    assert (enqueue.group, enqueue.phase) == ((0,), "decode")
    assert result.sim.records[0].token_s[0] == pytest.approx(0.22)
    assert len(result.sim.records[0].token_s) == 20
    _, result = run(world(), [TraceRequest(0.0, 100, 1)])
    assert result.sim.records[0].token_s[0] == pytest.approx(0.0125 + 0.0025)  # one instance: 5 ms + 10 ms


def test_round_is_split_into_batches_by_length() -> None:
    # the long one begins alone on all; while it runs nothing is free; then a batch of what has come
    work = [TraceRequest(0.0, 40_000, 1), *(TraceRequest(0.1, 400, 1) for _ in range(8)), TraceRequest(0.1, 20_000, 1)]
    policy, _ = run(world(), work)
    first, *rest = policy.of(CommitSpans)
    assert (first.request, len(first.spans[0].group)) == ("r0", 4)
    long = next(c for c in rest if c.request == "r9")
    assert not long.batched_with  # the long prompt is a batch of its own
    assert any(c.batched_with for c in rest)
    begun = [c.request for _, c in policy.done if isinstance(c, CommitSpans)]
    assert len({at for at, c in policy.done if isinstance(c, CommitSpans)}) == 2, begun
    single, _ = run(world(), work, prefill="single")
    assert not any(c.batched_with for c in single.of(CommitSpans))


def test_short_prompts_fill_idle_instances_of_a_running_round() -> None:
    # 60,000 tokens on at most two instances: two are free for prompts that end in time, even out of order
    work = [TraceRequest(0.0, 60_000, 1), TraceRequest(0.5, 63_000, 1), TraceRequest(0.6, 2000, 1)]
    policy, result = run(world(), work, max_sp=2)
    ends = [r.token_s[0] for r in result.sim.records]
    assert ends[2] < ends[0] < ends[1]
    at = {c.request: at for at, c in policy.done if isinstance(c, CommitSpans)}
    assert (at["r2"], at["r1"]) == (pytest.approx(0.6), pytest.approx(3.01))


def test_decode_groups_scale_up_when_kv_runs_out() -> None:
    # eight prompts share the one instance that a long decode has left; with their output they do not fit on it
    work = [TraceRequest(0.0, 20_000, 20_000), *(TraceRequest(0.5, 7950, 100) for _ in range(8))]
    options: dict[str, Any] = {
        "round_s": 100.0,
        "preempt": False,
        "migrate": False,
        "decode_step_s": 0.01,
        "wait_steps": 50,
    }
    policy, result = run(world(2), work, mode="paper", **options)
    groups = [action.group for action in policy.of(EnqueueRequest)]
    assert groups == [(0,)] + [(1,)] * 8 + [(0, 1)] * 9  # merged, when KV is nearly out
    assert [len(r.token_s) for r in result.sim.records] == [20_000] + [100] * 8
    assert sum(use.preemptions for use in result.sim.replicas) == 0
    alone, result = run(world(), [TraceRequest(0.0, 63_950, 300)], mode="paper")
    assert [action.group for action in alone.of(EnqueueRequest)] == [
        (0, 1)
    ]  # a scheduler refuses a request that it could never hold
    assert len(result.sim.records[0].token_s) == 300


def test_decode_groups_scale_up_with_many_requests() -> None:
    work = [TraceRequest(0.0, 100, 60) for _ in range(12)]
    policy, result = run(world(), work, decode_batch=3, **WAIT)
    assert max(len(action.group) for action in policy.of(EnqueueRequest)) > 1
    assert [len(r.token_s) for r in result.sim.records] == [60] * 12


def test_decodes_are_migrated_to_free_instances_for_a_prompt() -> None:
    work = [*(TraceRequest(0.3 * k, 8000, 4000) for k in range(4)), TraceRequest(1.4, 30_000, 1)]
    policy, result = run(world(), work, preempt=False)
    moved = policy.of(TransferKv)
    assert moved
    assert {m.request for m in moved} <= {p.request for p in policy.of(PreemptRequest)}
    ready = [event for _, event in policy.heard if isinstance(event, KvReady)]
    assert len(ready) == len(moved)
    assert len(policy.of(CommitSpans)[-1].spans[0].group) > 1
    assert [len(r.token_s) for r in result.sim.records] == [4000] * 4 + [1]
    still, _ = run(world(), work, preempt=False, migrate=False)
    assert not still.of(TransferKv)


def test_decodes_are_paused_for_a_prompt_that_gains_more_and_join_its_batch() -> None:
    work = [TraceRequest(0.0, 30_000, 20_000), TraceRequest(8.0, 12_000, 5)]
    policy, result = run(world(1), work, decode_step_s=0.001)
    assert [p.request for p in policy.of(PreemptRequest)] == ["r0"]
    assert [a.request for a in policy.of(EnqueueRequest)] == ["r0", "r0", "r1"]
    assert [len(r.token_s) for r in result.sim.records] == [20_000, 5]
    times = result.sim.records[0].token_s
    assert max(b - a for a, b in pairwise(times)) == pytest.approx(1.205, abs=0.01)
    assert result.sim.records[1].token_s[0] < times[-1]  # it did not wait for all of the decode
    still, _ = run(world(1), work, preempt=False)
    assert not still.of(PreemptRequest)


def test_request_larger_than_the_pool_is_rejected() -> None:
    _, result = run(world(2), [TraceRequest(0.0, 127_990, 20), TraceRequest(0.0, 1000, 2)])
    assert "more tokens than" in str(result.sim.records[0].error)
    assert result.sim.records[1].error is None


def test_a_reserved_pool_keeps_short_prompts_from_long_ones() -> None:
    work = [TraceRequest(0.0, 60_000, 1), TraceRequest(0.01, 60_000, 1), TraceRequest(0.1, 500, 3)]
    policy, result = run(world(), work, reserved=1)
    assert [pool.ids for pool in policy.policy.pools] == [(0, 1, 2), (3,)]
    # arrival at 0.1, 5 ms for one instance and 50 ms for 500 tokens
    assert result.sim.records[2].token_s[0] == pytest.approx(0.155)
    _, alone = run(world(), work)
    assert alone.sim.records[2].token_s[0] > 1.0


@pytest.mark.parametrize("prefill", ["batched", "single", "greedy"])
def test_disaggregated_decodes_go_to_decode_instances(prefill: str) -> None:
    spec = replace(cluster(4, decode=2), spans=LinearGroupLatency())
    heard = Scripted(lambda event, view: inner.on_event(event, view))
    inner = make_placement(
        "loongserve", PolicyContext(latency=LinearGroupLatency(), shape=spec.shape), {"prefill": prefill}
    )
    work = [TraceRequest(0.05 * k, 3000 + 500 * k, 5) for k in range(12)]
    result = simulate_cluster(spec, heard, work)
    assert [len(r.token_s) for r in result.sim.records] == [5] * 12
    assert sum(isinstance(event, RequestFinished) for _, event in heard.heard) == 12
    assert {e.instance for _, e in heard.heard if isinstance(e, KvReady)} == {4, 5}
    assert result.refused == 0


def test_greedy_reproduces_the_example_of_tetris() -> None:
    """§2.4: with 1 s of queue everywhere a prompt of 32k takes all 16 instances."""
    first = [ClusterInstance(id=i, node=i // 8, role="prefill", free_at_s=1.0) for i in range(16)]
    book = ClusterState(first, ClusterLinks(inside=LINKS["nvlink3"], across=LINKS["ib-200"]))
    policy = make_placement("loongserve", TETRIS_CONTEXT, {"prefill": "greedy"})
    assert isinstance(policy, GreedyDispatch)
    request = Request(id="r0", arrival_s=0.0, prompt_tokens=32_768, max_output_tokens=1)
    (commit,) = policy.on_event(RequestArrived(request), ClusterSnapshot(book, 0.0))
    assert isinstance(commit, CommitSpans)
    assert len(commit.spans[0].group) == 16
    short = Request(id="r1", arrival_s=0.0, prompt_tokens=4096, max_output_tokens=1)
    (commit,) = policy.on_event(RequestArrived(short), ClusterSnapshot(book, 0.0))
    assert isinstance(commit, CommitSpans)
    assert len(commit.spans[0].group) < 16


@given(
    work=st.lists(
        st.tuples(
            st.integers(0, 40), st.sampled_from([50, 700, 3000, 20_000, 90_000]), st.sampled_from([1, 2, 30, 150])
        ),
        min_size=1,
        max_size=25,
    ),
    mode=st.sampled_from(["paper", "default"]),
    prefill=st.sampled_from(["batched", "single"]),
    reserved=st.sampled_from([0, 1]),
    leave=st.sampled_from([None, 3.0]),
    noise=st.sampled_from([0.0, 0.3]),
)
@settings(max_examples=25, deadline=None, derandomize=True)
def test_no_token_is_lost_or_repeated(
    work: list[tuple[int, int, int]], mode: str, prefill: str, reserved: int, leave: float | None, noise: float
) -> None:
    requests = [TraceRequest(0.1 * at, tokens, output) for at, tokens, output in sorted(work)]
    how = RunSpec(seed=1, noise=NoiseSpec(kind="lognormal", amount=noise) if noise else NoiseSpec(), timeout_s=leave)
    policy, result = run(world(), requests, how, mode=mode, prefill=prefill, reserved=reserved, decode_batch=4, **WAIT)
    for record, source in zip(result.sim.records, requests, strict=True):
        if leave is None:
            assert record.ok or "more tokens than" in str(record.error)
        if record.ok:
            assert len(record.token_s) == source.output_tokens
            assert list(record.token_s) == sorted(set(record.token_s))
    if leave is None:
        assert result.refused == 0
    assert not any(pool.pending or pool.prefills or pool.decodes for pool in policy.policy.pools)
    again = run(world(), requests, how, mode=mode, prefill=prefill, reserved=reserved, decode_batch=4, **WAIT)[1]
    assert again.sim.records == result.sim.records


def test_clusters_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="must leave one of 4"):
        run(world(), [TraceRequest(0.0, 10, 1)], reserved=4)
    spec = world()
    policy = make_placement(
        "loongserve", PolicyContext(latency=LinearGroupLatency(), shape=spec.shape), {"prefill": "greedy"}
    )
    with pytest.raises(ConfigError, match="needs a cluster of prefill"):
        simulate_cluster(spec, policy, [TraceRequest(0.0, 10, 1)])
