"""Weave: where a prompt goes, how much groups yield to short prompts, and that runs lose nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.cluster_worlds import cluster

from headway import simulate
from headway.core.errors import ConfigError
from headway.core.request import Request, Slo
from headway.perf.latency.eq1 import Eq1Coefficients, Eq1Latency
from headway.policy.iteration.config import SchedulerConfig
from headway.policy.placement.base import (
    Action,
    ActionRefused,
    CommitSpans,
    EnqueueRequest,
    Event,
    PreemptRequest,
    RequestArrived,
    RequestPrefilled,
    ResumeRequest,
    SpanPaused,
    SpanProgress,
)
from headway.policy.placement.registry import PolicyContext, check_options, make_placement
from headway.policy.placement.view import ClusterSnapshot, ClusterState
from headway.policy.placement.weave import WeavePlacement
from headway.policy.placement.weave_groups import PlacedGroup, PlacedGroups
from headway.runtime.http_cluster.prefill_queue import LearnedLatency
from headway.sim.cluster.result import ClusterResult
from headway.sim.cluster.simulation import simulate_cluster
from headway.sim.cluster.spec import ClusterSpec
from headway.sim.noise import NoiseSpec
from headway.sim.spec import RunSpec
from headway.sim.workload import TraceRequest

LATENCY = Eq1Latency({s: Eq1Coefficients(2e-3 * s, 1e-3 / s, 1e-9 / s, 5e-10 / s) for s in (1, 2, 4)}, "test")
WIDE = {"rate": 0.2}


def made(options: dict[str, Any] | None = None, spec: ClusterSpec | None = None) -> Any:
    spec = spec or cluster(4, decode=1, per_node=4)
    return make_placement("weave", PolicyContext(latency=LATENCY, shape=spec.shape), {**WIDE, **(options or {})})


def ask(policy: Any, book: ClusterState, event: Event, now: float) -> list[Action]:
    return list(policy.on_event(event, ClusterSnapshot(book, now)))


def request(name: str, tokens: int, at: float = 0.0, ttft_s: float | None = None) -> Request:
    return Request(id=name, arrival_s=at, prompt_tokens=tokens, max_output_tokens=1, slo=Slo(ttft_s=ttft_s))


def book_of(spec: ClusterSpec) -> ClusterState:
    return ClusterState(spec.instances, spec.links)


def with_running_group(options: dict[str, Any] | None = None) -> tuple[Any, ClusterState]:
    """Return a policy and a cluster whose four prefill instances run one group since 0 s, expected to end at 6 s."""
    policy, book = made(options), book_of(cluster(4, decode=1, per_node=4))
    (commit,) = ask(policy, book, RequestArrived(request("long", 20_000)), 0.0)
    assert isinstance(commit, CommitSpans)
    for i in range(4):
        book.put(msgspec.structs.replace(book.instances[i], free_at_s=6.0))
    return policy, book


def test_long_prompts_are_committed_to_groups_and_short_ones_enqueued() -> None:
    policy, book = made(), book_of(cluster(4, decode=1, per_node=4))
    (commit,) = ask(policy, book, RequestArrived(request("long", 20_000)), 0.0)
    assert isinstance(commit, CommitSpans)
    assert commit.spans[-1].group == (0, 1, 2, 3)
    assert not commit.concurrent
    calm = made()
    (enqueue,) = ask(calm, book, RequestArrived(request("short", 4)), 0.0)
    assert enqueue == EnqueueRequest("short", (0,), "all", concurrent=False)


def test_running_group_is_paused_for_a_short_prompt_and_resumed_after_it() -> None:
    policy, book = with_running_group()
    first = ask(policy, book, RequestArrived(request("a", 100)), 1.0)
    assert first == [EnqueueRequest("a", (0,), "all", concurrent=True), PreemptRequest("long")]
    # any instance of the pausing group will do: it stops anyway
    second = ask(policy, book, RequestArrived(request("b", 100)), 1.0)
    assert second[0] in [EnqueueRequest("b", (i,), "all", concurrent=True) for i in range(4)]
    assert len(second) == 1, "the group is on its way to a pause already"
    assert ask(policy, book, SpanPaused("long", 0, SpanProgress(0, 7)), 1.1) == [ResumeRequest("long", 0.0)]


def test_group_yields_a_share_to_much_shorter_prompts_and_to_others_while_it_stays_in_time() -> None:
    def entered(options: dict[str, Any], tokens: int, count: int = 1, ttft_s: float = 5.0) -> int:
        (policy, book), inside = with_running_group(options), 0
        for k in range(count):
            actions = ask(policy, book, RequestArrived(request(f"s{k}", tokens, 1.0, ttft_s)), 1.0)
            inside += any(isinstance(action, EnqueueRequest) and action.concurrent for action in actions)
        return inside

    assert entered({}, 1000) == 1
    assert entered({}, 4000) == 1, "a fifth of what the group's prompt takes on one instance, though four compute it"
    assert 0 < entered({}, 6000, 60) < 10 < entered({}, 4000, 60), "more than a quarter: while the group stays in time"
    assert entered({}, 12_000) == 0, "it gains less than the group loses"
    assert entered({}, 4000, ttft_s=60.0) == 0, "all the more so where its target is lax"
    assert entered({"yields_to": 0.0}, 10) == 0
    given = [entered({"rho_min": share, "rho_max": share}, 300, 60, ttft_s=10.0) for share in (0.1, 0.3, 0.6)]
    assert 0 < given[0] < given[1] < given[2] < 60
    late = {"rho_min": 0.1, "rho_max": 0.1}
    assert entered(late, 300, 60, 2.5) > entered(late, 300, 60, 10.0), "what would be late enters all the same"


@pytest.mark.parametrize(("qps", "seed"), [(3.0, 0), (4.0, 2), (5.0, 0), (6.0, 1), (7.0, 2), (8.0, 0), (8.0, 2)])
def test_short_prompts_wait_no_longer_than_under_jsq(qps: float, seed: int) -> None:
    """Eight A100s, below and past what six can prefill. Shorts waited 14 to 33 s on instances that computed another
    group than the policy thought, and below saturation up to twice as long as under jsq for a layer of a whole document
    to end."""

    def short_p99_s(cluster: dict[str, Any]) -> float:
        mix = [
            {"class": "chat", "share": 0.97, "prompt": "lognormal:median=600,p90=3000,max=8K", "output": "fixed:64"},
            {"class": "document", "share": 0.03, "prompt": "uniform:60K-200K", "output": "fixed:64"},
        ]
        scenario = {
            "name": "saturated", "model": "llama-3-8b", "latency": {"source": "roofline"},
            "policy": {"policy": "lars", "chunking": "adaptive", "t_target_s": 0.25},
            "cluster": {"accelerator": "a100-80gb", **cluster},
            "workload": {"qps": qps, "requests": int(120 * qps), "mix": mix},
        }  # fmt: skip
        records = [r for r in simulate(scenario, seed=seed).records if r.klass == "chat"]
        return sorted(r.token_s[0] - r.arrival_s for r in records)[int(0.99 * len(records))]

    pools = [{"role": "prefill", "count": 6}, {"role": "decode", "count": 2}]
    weave = short_p99_s({"placement": "weave", "options": {"rate": 0.3}, "pools": pools})
    jsq = short_p99_s({"placement": "jsq", "pools": [{"role": "mixed", "count": 8}]})
    assert weave <= 1.05 * jsq


@pytest.mark.long
def test_short_prompts_among_all_sizes_in_bursts_wait_hardly_longer_than_under_jsq() -> None:
    """Prompts of 1K to 125K that come at once: those up to 8K waited 1.4 times as long, behind groups of 9K to 30K
    that yielded to prompts of a quarter of their size only. jsq prefills on eight instances, Weave on six."""

    def short_p99_s(seed: int, cluster: dict[str, Any]) -> float:
        scenario = {
            "name": "bursts", "model": "llama-3-8b", "latency": {"source": "roofline"},
            "policy": {"policy": "lars", "chunking": "adaptive", "t_target_s": 0.25},
            "cluster": {"accelerator": "a100-80gb", **cluster},
            "workload": {"preset": "mooncake-like", "arrivals": "gamma", "cv": 5, "qps": 1.5, "requests": 400,
                         "max_output": 64},
        }  # fmt: skip
        records = [r for r in simulate(scenario, seed=seed).records if r.prompt_tokens <= 8192]
        return sorted(r.token_s[0] - r.arrival_s for r in records)[int(0.99 * len(records))]

    pools = [{"role": "prefill", "count": 6}, {"role": "decode", "count": 2}]
    weave = sum(short_p99_s(seed, {"placement": "weave", "pools": pools}) for seed in range(4))
    jsq = sum(short_p99_s(seed, {"placement": "jsq", "pools": [{"role": "mixed", "count": 8}]}) for seed in range(4))
    assert weave <= 1.15 * jsq


def test_what_a_delay_holds_up_is_what_waits_behind_it_on_any_instance() -> None:
    groups = PlacedGroups()
    for name, group in (("a", (0, 1)), ("b", (1, 2)), ("c", (2,)), ("d", (3,))):
        groups.add(PlacedGroup(name, [group], [0.0], [0.1], 10.0, 10.0, 20.0, deadline_s=50.0, due_s=50.0))
    first = groups.get("a")
    assert first is not None
    assert [(placed.request, s) for placed, s in groups.delayed([(first, 2.0)])] == [("a", 2.0), ("b", 2.0), ("c", 2.0)]


def test_short_prompts_on_groups_do_not_send_the_next_one_behind_a_document() -> None:
    """It waited 4.3 s behind the document: it could not go before groups of its own size, which had 50 ms to wait."""
    long = {i for i in range(60) if i % 9 == 3}
    traffic = [TraceRequest(0.03 * i, 16_000 if i in long else 150 + 37 * (i % 7), 3) for i in range(60)]
    spec = cluster(4, 2)
    result = simulate_cluster(spec, make_placement("weave", spec.policy_context, WIDE), traffic)
    waits = [r.token_s[0] - r.arrival_s for i, r in enumerate(result.sim.records) if i not in long]
    assert max(waits) < 0.2


def test_chunks_are_cut_so_that_their_groups_can_be_paused() -> None:
    def spans(options: dict[str, Any]) -> list[tuple[int, int]]:
        (commit,) = ask(
            made(options), book_of(cluster(4, decode=1, per_node=4)), RequestArrived(request("a", 20_000)), 0
        )
        assert isinstance(commit, CommitSpans)
        assert {span.group for span in commit.spans} == {(0, 1, 2, 3)}
        return [(span.start, span.end) for span in commit.spans]

    assert len(spans({"pause_s": 10.0})) == 1
    fine = spans({"pause_s": 0.05})
    assert len(fine) > 1
    assert fine[0][0] == 0
    assert fine[-1][1] == 20_000
    assert all(one[1] == other[0] for one, other in pairwise(fine))
    assert len(spans({"yields_to": 0.0, "pause_s": 0.05})) == 1, "what never yields is not cut"


def test_share_of_yielding_follows_relative_slack_down_to_the_least() -> None:
    placed = PlacedGroup("r", [(0, 1)], [0.0], [0.1], 10.0, 10.0, 20.0, deadline_s=50.0, due_s=50.0)
    assert placed.slack(0.0) == 4.0
    # a share r of the total is r / (1 - r) of the work; ample slack is cut to the largest share, little to the least
    assert placed.yieldable_s(0.0, 0.2, 0.7) == pytest.approx(10 * 0.7 / 0.3)
    assert placed.yieldable_s(49.0, 0.2, 0.7) == pytest.approx(10 * 0.2 / 0.8)
    placed.delay(2.0)
    assert (placed.end_s, placed.starts_s, placed.slack(0.0)) == (12.0, [2.0], 3.8)
    # 2.5 s in all, less the 2 s yielded
    assert placed.yieldable_s(49.0, 0.2, 0.7) == pytest.approx(0.5)


def test_refused_commitment_is_placed_again() -> None:
    policy, book = with_running_group()
    again = ask(policy, book, ActionRefused("long", "commit", "stale"), 0.0)
    assert [type(action) for action in again] == [CommitSpans]
    assert len(policy.groups) == 1
    ask(policy, book, RequestArrived(request("a", 100)), 1.0)
    assert ask(policy, book, ActionRefused("long", "preempt", "it is in its last layer"), 1.0) == []
    assert PreemptRequest("long") in ask(policy, book, RequestArrived(request("b", 100)), 1.5)


@pytest.mark.parametrize("name", ["tetris", "fixed-sp"])
def test_other_policies_place_a_refused_commitment_again(name: str) -> None:
    spec = cluster(4, decode=1, per_node=4)
    policy = make_placement(
        name, PolicyContext(latency=LATENCY, shape=spec.shape), {"sp": 4} if name != "tetris" else {}
    )
    first = ask(policy, book_of(spec), RequestArrived(request("long", 20_000)), 0.0)
    assert ask(policy, book_of(spec), ActionRefused("long", "commit", "stale"), 0.0) == first


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rho_min": 0.8}, "options of weave: `rho_min` must be at most"),
        ({"yields_to": -1.0}, "yields_to must be at least 0"),
        ({"anchored": False}, "for tetris alone"),
        ({"speed": 1}, "speed is not a field; allowed here: mode, affinity, sizes"),
    ],
)
def test_bad_options_are_named_in_the_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_options("weave", options)


def test_cluster_without_decode_instances_is_refused() -> None:
    spec = cluster(4)
    with pytest.raises(ConfigError, match="role decode"):
        simulate_cluster(spec, made(spec=spec), [TraceRequest(0.0, 100, 5)])


def run(requests: Sequence[TraceRequest], options: dict[str, Any] | None = None, noise: float = 0.0) -> ClusterResult:
    spec = cluster(4, decode=1, per_node=2)
    how = RunSpec(noise=NoiseSpec("lognormal", noise) if noise else NoiseSpec())
    return simulate_cluster(spec, made(options, spec), requests, how, keep_bars=True)


def work(draw: Sequence[tuple[float, bool, int]]) -> list[TraceRequest]:
    at, made = 0.0, []
    for gap_s, long, size in draw:
        at += gap_s
        made.append(TraceRequest(at, 2000 + 60 * size if long else 1 + size, 1 + size % 7, klass="ls"[not long]))
    return made


WORK = st.lists(st.tuples(st.floats(0.0, 0.4), st.booleans(), st.integers(0, 300)), min_size=1, max_size=40).map(work)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(WORK, st.sampled_from([0.0, 0.3]), st.sampled_from([0.0, 0.25, 5.0]))
def test_every_request_gets_all_tokens_and_groups_compute_each_layer_once(
    requests: list[TraceRequest], noise: float, yields_to: float
) -> None:
    result = run(requests, {"yields_to": yields_to}, noise)
    for record, source in zip(result.sim.records, requests, strict=True):
        assert record.ok, record.error
        assert len(record.token_s) == source.output_tokens
        assert list(record.token_s) == sorted(record.token_s)
    exclusive(result)
    if not noise:
        computed(result)


def exclusive(result: ClusterResult) -> None:
    """Check that on each instance groups and batches never overlap."""
    for i in range(4):
        bars = sorted((b.start_s, b.end_s) for b in result.bars if b.instance == i and b.kind in ("span", "batch"))
        assert all(a[1] <= b[0] + 1e-9 for a, b in pairwise(bars))


def computed(result: ClusterResult) -> None:
    """Check that the pieces of each span add up to its undisturbed time, however often it was paused."""
    seconds: dict[tuple[str, str, int], float] = {}
    for bar in result.bars:
        if bar.kind == "span":
            key = (bar.request, bar.note, bar.instance)
            seconds[key] = seconds.get(key, 0.0) + bar.end_s - bar.start_s
    for (request, note, _), found in seconds.items():
        group = {i for r, n, i in seconds if (r, n) == (request, note)}
        start, end = map(int, note.split(":"))
        assert found == pytest.approx((end - start) * 1e-3 / len(group), rel=1e-6)


def test_short_prompts_gain_from_yielding_and_long_ones_lose_at_most_their_share() -> None:
    longs = [TraceRequest(4.0 * k, 16_000, 1, klass="long") for k in range(6)]
    shorts = [TraceRequest(0.05 + 0.1 * k, 100, 1, klass="short") for k in range(240)]
    requests = sorted([*longs, *shorts], key=lambda r: r.arrival_s)

    def mean_s(result: ClusterResult, klass: str) -> float:
        waits = [r.token_s[0] - r.arrival_s for r in result.sim.records if r.klass == klass]
        return sum(waits) / len(waits)

    without, within = run(requests, {"yields_to": 0.0}), run(requests)
    assert within.paused > 10
    assert without.paused == 0
    assert mean_s(within, "short") < 0.2 * mean_s(without, "short")
    least = run(requests, {"rho_min": 0.05, "rho_max": 0.05})
    # with at most 0.7 of the time yielded, a long prompt takes at most 1 / 0.3 of its time
    assert mean_s(within, "long") < mean_s(without, "long") / 0.3
    assert mean_s(least, "long") < 1.15 * mean_s(without, "long")
    assert mean_s(within, "short") < mean_s(least, "short")


def test_long_prompt_on_one_instance_is_a_group_of_one_that_can_be_paused() -> None:
    state = book_of(cluster(4, decode=1, per_node=4))
    for i in range(1, 4):
        state.put(msgspec.structs.replace(state.instances[i], free_at_s=50.0))
    policy = made()
    (commit,) = ask(policy, state, RequestArrived(request("long", 4000)), 0.0)
    assert isinstance(commit, CommitSpans)
    assert {span.group for span in commit.spans} == {(0,)}
    state.put(msgspec.structs.replace(state.instances[0], free_at_s=4.0))
    assert ask(policy, state, RequestArrived(request("a", 100)), 0.5) == [
        EnqueueRequest("a", (0,), "all", True),
        PreemptRequest("long"),
    ]
    batched = made({"batch_s": 9.0})
    state.put(msgspec.structs.replace(state.instances[0], free_at_s=0.0))
    assert ask(batched, state, RequestArrived(request("long", 4000)), 0.0) == [EnqueueRequest("long", (0,), "all")]


def test_a_resumed_prompt_comes_before_what_waits_and_behind_what_runs() -> None:
    state, groups = book_of(cluster(4, decode=1, per_node=4)), PlacedGroups()
    view = ClusterSnapshot(state, 0.0)
    for name, group in (("a", (0,)), ("b", (1,)), ("c", (0, 1)), ("d", (2, 3))):
        groups.add(PlacedGroup(name, [group], [0.0], [0.1], 10.0, 10.0, 20.0, deadline_s=50.0, due_s=50.0))
    groups.resume("c", view)
    assert [placed.request for placed in groups.on(0)] == ["a", "c"], "a runs there"
    state.put(msgspec.structs.replace(state.instances[1], running=1))
    groups.add(PlacedGroup("e", [(1,), (1, 2)], [0.0] * 2, [0.1] * 2, 10.0, 10.0, 20.0, deadline_s=50.0, due_s=50.0))
    groups.resume("e", ClusterSnapshot(state, 1.0))
    assert [placed.request for placed in groups.on(1)] == ["e", "b", "c"]
    assert [placed.request for placed in groups.on(2)] == ["d", "e"], "with the spans to come, on other instances too"


def test_a_resumed_prompt_comes_before_the_later_spans_of_what_runs() -> None:
    """Else shorts entered instances that computed another prompt than the policy thought, and waited for its end."""
    groups, view = PlacedGroups(), ClusterSnapshot(book_of(cluster(4, decode=1, per_node=4)), 0.0)
    first, second = (PlacedGroup(name, [(0, 1)] * 2, [0.0] * 2, [0.1] * 2, 9.0, 9.0, 20.0, 50.0, 50.0) for name in "ab")
    groups.add(first)
    groups.add(second)
    groups.resume("b", view)
    assert groups.is_running(first, view)
    groups.advance(first)
    assert groups.is_running(second, view)
    groups.remove("b")
    assert groups.is_running(first, view)


def whole(spec: ClusterSpec, options: dict[str, Any] | None = None) -> Any:
    context = PolicyContext(latency=LATENCY, shape=spec.shape, whole_prompts=True)
    return make_placement("weave", context, {"sizes": [1], **(options or {})})


def test_where_instances_compute_whole_prompts_long_ones_have_a_lower_priority_than_what_goes_before_them() -> None:
    spec = cluster(1)
    policy, book = whole(spec), book_of(spec)

    def asked(name: str, tokens: int, now: float) -> Action:
        prompt = Request(id=name, arrival_s=now, prompt_tokens=tokens, max_output_tokens=9)
        (action,) = ask(policy, book, RequestArrived(prompt), now)
        return action

    assert asked("first", 100, 0.0) == EnqueueRequest("first", (0,), "prefill")
    assert asked("long", 20_000, 0.0) == EnqueueRequest("long", (0,), "prefill", yields=True)
    book.put(msgspec.structs.replace(book.instances[0], free_at_s=21.0, running=2))
    assert asked("short", 1000, 0.5) == EnqueueRequest("short", (0,), "prefill", concurrent=True)
    # As much work as the long prompt has: behind it.
    assert asked("other", 20_000, 0.5) == EnqueueRequest("other", (0,), "prefill", yields=True)
    # Until the long prompts have yielded their share of time; then in the order that the scheduler has for its equals.
    later = [asked(f"s{i}", 1000, 0.5) for i in range(40)]
    yields = [action.yields for action in later if isinstance(action, EnqueueRequest)]
    assert len(yields) == len(later)
    assert not yields[0]
    assert yields[-1]
    assert yields == sorted(yields)
    (decode,) = ask(policy, book, RequestPrefilled("long", (0,)), 22.0)
    assert decode == EnqueueRequest("long", (0,), "decode", concurrent=True)


@settings(max_examples=40, derandomize=True, deadline=None)
@given(WORK)
def test_whole_prompts_on_instances_with_schedulers_lose_nothing(requests: list[TraceRequest]) -> None:
    spec = cluster(2)
    result = simulate_cluster(spec, whole(spec), requests, RunSpec())
    for record, source in zip(result.sim.records, requests, strict=True):
        assert record.ok, record.error
        assert len(record.token_s) == source.output_tokens
    assert not result.paused


def test_plans_of_whole_prompts_follow_times_that_are_learned() -> None:
    spec = cluster(2)
    latency = LearnedLatency(LATENCY)
    context = PolicyContext(latency=latency, shape=spec.shape, whole_prompts=True)
    policy, view = make_placement("weave", context, {"sizes": [1]}), ClusterSnapshot(book_of(spec), 0.0)
    assert isinstance(policy, WeavePlacement)
    before = policy.tetris.plan(request("a", 1000), view)
    latency.learn(0, 1000, 10 * before.ttft_s)
    assert policy.tetris.plan(request("b", 1000), view).ttft_s == pytest.approx(10 * before.ttft_s)


def test_short_whole_prompts_gain_from_yielding() -> None:
    longs = [TraceRequest(4.0 * k, 16_000, 1, klass="long") for k in range(6)]
    shorts = [TraceRequest(0.05 + 0.1 * k, 100, 1, klass="short") for k in range(240)]
    requests = sorted([*longs, *shorts], key=lambda r: r.arrival_s)
    spec = cluster(1)
    config = SchedulerConfig(policy="fcfs", chunking="static:512", long_tokens=1 << 40)
    chunked = replace(spec, engine=lambda group: replace(spec.engine(group), config=config))

    def mean_s(options: dict[str, Any]) -> float:
        result = simulate_cluster(chunked, whole(chunked, options), requests, RunSpec())
        waits = [r.token_s[0] - r.arrival_s for r in result.sim.records if r.klass == "short"]
        return sum(waits) / len(waits)

    assert mean_s({}) < 0.5 * mean_s({"yields_to": 0.0})
