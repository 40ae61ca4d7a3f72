"""The ladder in a cluster: late binding, sizes of groups, pauses, KV room, and that nothing is lost or starves."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.cluster_worlds import PerToken, cluster, run_to_end

from headway.control.controller import ClusterController
from headway.core.request import Request, Slo
from headway.policy.placement.contract import (
    Action,
    ActionRefused,
    ClusterSnapshot,
    ClusterState,
    CommitSpans,
    EnqueueRequest,
    PreemptRequest,
    RequestArrived,
    ResumeRequest,
    SpanDone,
    SpanPaused,
    WakeupDue,
)
from headway.policy.placement.ladder import LadderPlacement
from headway.policy.placement.registry import PolicyContext, make_placement
from headway.sim.cluster.simulation import ClusterSimulation
from headway.sim.cluster.state import ClusterSpec
from headway.sim.result import SimResult
from headway.sim.spec import NoiseSpec, RunSpec
from headway.sim.workload import TraceRequest


def made(whole: bool = False) -> LadderPlacement:
    context = PolicyContext(latency=PerToken(), shape=cluster().shape, whole_prompts=whole)
    policy = make_placement("ladder", context)
    assert isinstance(policy, LadderPlacement)
    return policy


def state_of(count: int = 4, decode: int = 1, **fields: Any) -> ClusterState:
    spec = cluster(count, decode)
    state = ClusterState(spec.instances, spec.links)
    for i in range(count):
        state.put(msgspec.structs.replace(state.instances[i], **fields))
    for i in range(count, count + decode):
        # with so many decodes, no prompt is worth their time
        state.put(msgspec.structs.replace(state.instances[i], running=300, used=1000))
    return state


def asked(name: str, tokens: int, at_s: float = 0.0, ttft_s: float | None = None, priority: int = 0) -> RequestArrived:
    slo = Slo(ttft_s=ttft_s)
    return RequestArrived(
        Request(id=name, arrival_s=at_s, prompt_tokens=tokens, max_output_tokens=4, slo=slo, priority=priority)
    )


def group_of(action: Action) -> tuple[int, ...]:
    return action.spans[0].group if isinstance(action, CommitSpans) else getattr(action, "group", ())


def busy(state: ClusterState, until_s: float, *instances: int) -> None:
    for i in instances:
        state.put(msgspec.structs.replace(state.instances[i], free_at_s=until_s))


# -- where and when ------------------------------------------------------------------------------------------------


def test_an_idle_cluster_gives_a_long_prompt_all_of_it_and_a_short_one_a_scheduler() -> None:
    (long,) = made().on_event(asked("long", 20_000), ClusterSnapshot(state_of(), 0.0))
    assert isinstance(long, CommitSpans)
    assert group_of(long) == (0, 1, 2, 3)
    (short,) = made().on_event(asked("short", 300), ClusterSnapshot(state_of(), 0.0))
    assert isinstance(short, EnqueueRequest)
    assert (len(short.group), short.phase) == (1, "prefill")


def test_nothing_is_bound_to_an_instance_that_has_work_and_the_shortest_goes_first_when_it_is_free() -> None:
    policy, state = made(), state_of()
    busy(state, 3.0, 0, 1, 2, 3)
    for name, tokens in (("a", 9000), ("b", 2000), ("c", 4000)):
        assert policy.on_event(asked(name, tokens), ClusterSnapshot(state, 0.0)) == []
    busy(state, 0.0, 2)
    actions = policy.on_event(asked("d", 30_000, 0.5), ClusterSnapshot(state, 0.5))
    assert [(action.request, group_of(action)) for action in actions] == [("b", (2,))]


def test_the_more_wait_the_smaller_are_groups() -> None:
    sizes = []
    for others in (0, 30):
        # what a group of several costs beyond its share makes the difference
        policy, state = made(), state_of()
        policy._sizing._latency = Overheads()
        busy(state, 9.0, 0, 1, 2, 3)
        for i in range(others):
            policy.on_event(asked(f"o{i}", 60_000, ttft_s=1e4), ClusterSnapshot(state, 0.0))
        policy.on_event(asked("one", 20_000, ttft_s=1e4), ClusterSnapshot(state, 0.0))
        busy(state, 0.0, 0, 1, 2, 3)
        actions = policy.on_event(WakeupDue(), ClusterSnapshot(state, 1.0))
        sizes.append(next(len(group_of(action)) for action in actions if action.request == "one"))
    assert sizes[0] == 4
    assert sizes[1] < 4


class Overheads(PerToken):
    """Groups lose a tenth of their speed with each doubling."""

    def prefill_s(self, past: int, tokens: int, group: Any) -> float:
        return tokens * 1e-3 / group.sp * (1.0 + 0.1 * (group.sp - 1))


def test_a_prompt_waits_for_a_larger_group_only_where_that_ends_sooner() -> None:
    for free_s, waits in ((0.5, True), (40.0, False)):
        policy, state = made(), state_of()
        busy(state, free_s, 1, 2, 3)
        actions = policy.on_event(asked("long", 20_000), ClusterSnapshot(state, 0.0))
        assert (actions == []) == waits
        if not waits:
            continue
        # what ends before the group begins may use the instance meanwhile
        assert policy.on_event(asked("brief", 300, 0.01), ClusterSnapshot(state, 0.01)) != []
        assert policy.on_event(asked("low", 700, 0.02, priority=1), ClusterSnapshot(state, 0.02)) == []


def test_instances_that_decode_compute_whole_prompts_and_short_ones_join_a_long_one() -> None:
    policy, state = made(whole=True), state_of(2, 0)
    for name in ("one", "two"):
        (long,) = policy.on_event(asked(name, 20_000), ClusterSnapshot(state, 0.0))
        assert isinstance(long, EnqueueRequest)
        assert long.phase == "all"
        state.put(msgspec.structs.replace(state.instances[long.group[0]], free_at_s=20.0, running=1))
    (short,) = policy.on_event(asked("short", 500), ClusterSnapshot(state, 0.0))
    assert isinstance(short, EnqueueRequest)
    # another long one would wait for them there, and waits here instead
    assert policy.on_event(asked("third", 20_000), ClusterSnapshot(state, 0.0)) == []


def test_of_unequal_instances_a_prompt_waits_for_a_fast_one_as_long_as_it_ends_there_first() -> None:
    found = []
    for free_s in (1.0, 6.0):
        # instance 1 takes three times as long as the mean
        context = PolicyContext(
            latency=PerToken(),
            shape=cluster().shape,
            whole_prompts=True,
            relative_s=lambda instance, tokens: 3.0 if instance else 1.0,
        )
        policy, state = make_placement("ladder", context), state_of(2, 0)
        busy(state, free_s, 0)
        found.append([group_of(each) for each in policy.on_event(asked("one", 2000), ClusterSnapshot(state, 0.0))])
    assert found == [[], [(1,)]]


def test_priorities_are_strict() -> None:
    policy, state = made(), state_of(1)
    busy(state, 3.0, 0)
    policy.on_event(asked("low", 1000), ClusterSnapshot(state, 0.0))
    policy.on_event(asked("high", 30_000, priority=-1), ClusterSnapshot(state, 0.0))
    busy(state, 0.0, 0)
    first, *_ = policy.on_event(asked("last", 40_000), ClusterSnapshot(state, 1.0))
    assert first.request == "high"


# -- pauses --------------------------------------------------------------------------------------------------------


def test_a_prompt_that_would_be_late_pauses_a_group_that_stays_in_time_which_goes_on_afterwards() -> None:
    policy, state = made(), state_of()
    (commit,) = policy.on_event(asked("long", 40_000), ClusterSnapshot(state, 0.0))
    assert group_of(commit) == (0, 1, 2, 3)
    busy(state, 10.0, 0, 1, 2, 3)
    actions = policy.on_event(asked("short", 400, 1.0), ClusterSnapshot(state, 1.0))
    assert actions == [PreemptRequest("long")]
    busy(state, 1.01, 0, 1, 2, 3)
    (enqueued,) = policy.on_event(SpanPaused("long", 0, None), ClusterSnapshot(state, 1.01))
    assert isinstance(enqueued, EnqueueRequest)
    (resumed,) = policy.on_event(asked("other", 60_000, 2.0), ClusterSnapshot(state, 2.0))
    assert resumed == ResumeRequest("long")


@pytest.mark.parametrize(("tokens", "ttft_s"), [(400, 10.5), (30_000, None)])
def test_a_group_is_not_paused_for_one_that_is_in_time_anyway_or_longer(tokens: int, ttft_s: float | None) -> None:
    policy, state = made(), state_of()
    policy.on_event(asked("long", 40_000), ClusterSnapshot(state, 0.0))
    busy(state, 10.0, 0, 1, 2, 3)
    assert policy.on_event(asked("other", tokens, 1.0, ttft_s), ClusterSnapshot(state, 1.0)) == []


def test_a_refused_pause_is_not_tried_again_and_a_refused_commitment_is_queued() -> None:
    policy, state = made(), state_of()
    policy.on_event(asked("long", 40_000), ClusterSnapshot(state, 0.0))
    busy(state, 10.0, 0, 1, 2, 3)
    policy.on_event(asked("short", 400, 1.0), ClusterSnapshot(state, 1.0))
    assert policy.on_event(ActionRefused("long", "preempt", "last layer"), ClusterSnapshot(state, 1.0)) == []
    busy(state, 0.0, 0, 1, 2, 3)
    actions = policy.on_event(SpanDone("long", 0, True), ClusterSnapshot(state, 2.0))
    assert "short" in [action.request for action in actions]
    (again,) = made().on_event(asked("x", 20_000), ClusterSnapshot(state, 3.0))
    policy = made()
    policy.on_event(asked("x", 20_000), ClusterSnapshot(state, 3.0))
    (retried,) = policy.on_event(ActionRefused("x", "commit", "stale"), ClusterSnapshot(state, 3.1))
    assert group_of(retried) == group_of(again)


# -- KV ------------------------------------------------------------------------------------------------------------


def test_a_prompt_whose_decode_finds_no_room_waits_before_its_prefill() -> None:
    policy, state = made(), state_of()
    state.put(msgspec.structs.replace(state.instances[4], used=63_900))
    assert policy.on_event(asked("short", 400), ClusterSnapshot(state, 0.0)) == []
    state.put(msgspec.structs.replace(state.instances[4], used=60_000))
    actions = policy.on_event(asked("tiny", 30), ClusterSnapshot(state, 0.1))
    assert {action.request for action in actions} == {"short", "tiny"}


def test_of_decode_instances_the_one_with_the_most_room_for_each_request_is_chosen_and_room_on_the_way_counts() -> None:
    policy, state = made(), state_of(4, 2)
    state.put(msgspec.structs.replace(state.instances[4], used=30_000))
    for name in ("a", "b"):
        policy.on_event(asked(name, 400), ClusterSnapshot(state, 0.0))
    assert policy._decodes.virtual_usage(5) == 800


# -- whole runs ----------------------------------------------------------------------------------------------------

POOL = 6000


class Watched(LadderPlacement):
    """Counts on each instance what begins on it, and that no two groups have it."""

    def on_event(self, event: Any, view: ClusterSnapshot) -> Sequence[Action]:
        actions = super().on_event(event, view)
        used = [i for each in self._running.values() for i in each.group]
        assert len(used) == len(set(used))
        assert all(each.used <= each.capacity for each in view.instances)
        return actions


def world(seed: int) -> tuple[ClusterSpec, list[TraceRequest], RunSpec]:
    """Pools of any roles, KV short or not, noise, lengths from a few tokens to more than one instance holds."""
    chance = random.Random(seed)
    decode = chance.choice((0, 1, 2))
    count, pool = chance.randint(2, 5), chance.choice((POOL, 10 * POOL))
    most = int((1.8 if decode else 0.9) * POOL)
    rate = chance.choice((1.0, 4.0, 12.0))
    at_s, requests = 0.0, list[TraceRequest]()
    for _ in range(40):
        at_s += chance.expovariate(rate)
        tokens = chance.randint(10, 400) if chance.random() < 0.7 else chance.randint(400, most)
        # a decode instance has to hold it alone
        requests.append(TraceRequest(at_s, min(tokens, POOL - 200), chance.randint(1, 30)))
    noise = NoiseSpec(kind="lognormal", amount=0.4) if chance.random() < 0.5 else NoiseSpec()
    return cluster(count, decode, pool=pool), requests, RunSpec(seed=seed, noise=noise)


def run(spec: ClusterSpec, requests: Sequence[TraceRequest], run_spec: RunSpec | None = None) -> SimResult:
    simulation = ClusterSimulation(spec, Watched(spec.policy_context, None), requests, run_spec or RunSpec())
    result = run_to_end(simulation)
    policy = simulation.controller.policy
    assert isinstance(policy, LadderPlacement)
    assert [*policy._waiting, *policy._running, *policy._paused, *policy._placed] == []
    return result


@settings(max_examples=25, derandomize=True, deadline=None)
@given(seed=st.integers(0, 1 << 20))
def test_every_request_ends_no_instance_is_used_twice_and_no_kv_is_overbooked_or_left(seed: int) -> None:
    result = run(*world(seed))
    assert all(record.ok for record in result.records)


@settings(max_examples=10, derandomize=True, deadline=None)
@given(seed=st.integers(0, 1 << 20))
def test_requests_that_leave_and_instances_that_are_lost_take_nothing_with_them(seed: int) -> None:
    spec, requests, run_spec = world(seed)
    chance = random.Random(f"faults {seed}")
    simulation = ClusterSimulation(spec, Watched(spec.policy_context, None), requests, run_spec)
    controller = simulation.controller
    settle, lost = controller.settle, list[int]()
    prefill = [each.id for each in spec.instances if each.role != "decode"]

    def hurt(now: float) -> float | None:
        if chance.random() < 0.03 and controller.requests:
            controller.drop(chance.choice(list(controller.requests.values())), "its client left", now)
        if chance.random() < 0.01 and len(prefill) > 1 + len(lost):
            lost.append(chance.choice([i for i in prefill if i not in lost]))
            controller.lost(lost[-1], now)
        return settle(now)

    with pytest.MonkeyPatch.context() as hooked:
        hooked.setattr(controller, "settle", hurt)
        simulation.run_events()
    assert not controller.requests
    assert_nothing_left(controller)


def assert_nothing_left(controller: ClusterController) -> None:
    policy = controller.policy
    assert isinstance(policy, LadderPlacement)
    assert [*policy._waiting, *policy._running, *policy._paused, *policy._placed] == []
    assert all(policy._decodes.virtual_usage(i) == 0 for i in range(len(controller.cluster.instances)))


def test_the_longest_wait_is_bounded_where_short_prompts_keep_a_cluster_full() -> None:
    """Ten times what arrives is short: shortest first alone would leave the long ones for the end."""
    spec = cluster(4, 1)
    shorts = [TraceRequest(0.08 * i, 300, 1) for i in range(4000)]
    longs = [TraceRequest(1.0 + 8.0 * i, 6000, 1) for i in range(20)]
    requests = sorted([*shorts, *longs], key=lambda each: each.arrival_s)
    result = run(spec, requests)
    waits = [record.token_s[0] - record.arrival_s for record in result.records if record.prompt_tokens == 6000]
    assert max(waits) < 60.0
    assert result.duration_s < 340.0


def test_decode_pools_that_are_full_hold_prompts_back_rather_than_answers_apart() -> None:
    """The gap between a request's first two tokens stays short; under Tetris it is as long as the pool is full."""
    gaps = {}
    for name in ("ladder", "tetris"):
        spec = cluster(4, 1, pool=POOL)
        requests = [TraceRequest(0.05 * i, 1500, 200) for i in range(60)]
        simulation = ClusterSimulation(spec, make_placement(name, spec.policy_context), requests, RunSpec())
        simulation.run_events()
        records = simulation.result().sim.records
        assert all(record.ok for record in records)
        gaps[name] = max(record.token_s[1] - record.token_s[0] for record in records)
    assert gaps["ladder"] < gaps["tetris"] / 4


def test_a_thousand_waiting_prompts_are_decided_about_in_few_looks() -> None:
    """What is looked at for a decision does not grow with the queue."""
    looks = []
    for waiting in (50, 1000):
        policy, state = made(), state_of(4)
        busy(state, 50.0, 0, 1, 2, 3)
        for i in range(waiting):
            policy.on_event(asked(f"r{i}", 3000 + i, ttft_s=1e5), ClusterSnapshot(state, 0.0))
        busy(state, 0.0, 2)
        with patch.object(policy, "_place", wraps=policy._place) as place:
            policy.on_event(asked("last", 90_000, 1.0), ClusterSnapshot(state, 1.0))
        looks.append(place.call_count)
    assert looks[1] <= looks[0] <= 20
