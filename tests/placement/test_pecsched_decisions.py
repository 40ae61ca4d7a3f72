"""PecSched's decisions in a drill without schedulers: placement order, preemption, ageing, and group sizes."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.request import Request, Slo
from headway.perf.hardware import NetworkLink, model
from headway.perf.latency.groups import GroupShape
from headway.policy.placement.contract import (
    ClusterInstance,
    ClusterLinks,
    ClusterState,
    CommitSpans,
    EnqueueRequest,
    PreemptRequest,
    ResumeRequest,
)
from headway.policy.placement.pecsched import PecSched, PecSchedOptions
from headway.policy.placement.registry import PolicyContext
from headway_research.pecsched.drill import DrillResult, PlacementDrill
from headway_research.pecsched.literal import LiteralPecSched

LINK = NetworkLink(name="test", bytes_per_s=1e9, latency_s=0.0, source="test", efficiency=1.0)
SHAPE = model("mistral-7b")


class Linear:
    """`GroupLatency`: 0.1 ms a token, divided by the group's size; plain rings take 1.3 times as long."""

    source = "test"

    def prefill_s(self, past: int, tokens: int, group: GroupShape) -> float:
        return tokens * 1e-4 / group.sp * (1.3 if group.strategy.attn == "ring" else 1.0)

    def solve_tokens(self, past: int, budget_s: float, group: GroupShape) -> int:
        return int(budget_s * 1e4 * group.sp)


def book(replicas: int, decodes: int = 2, per_node: int = 4) -> ClusterState:
    first = [ClusterInstance(id=i, node=i // per_node, role="prefill", capacity=1 << 20) for i in range(replicas)]
    rest = [ClusterInstance(id=replicas + i, node=1000 + i, role="decode", capacity=1 << 20) for i in range(decodes)]
    return ClusterState([*first, *rest], ClusterLinks(inside=LINK, across=LINK))


def policy(literal: bool = False, **options: Any) -> PecSched:
    given = {"long_replicas": "fixed", "long_sp": 3, "long_tokens": 10_000, "batch_tokens": 2000, **options}
    kind = LiteralPecSched if literal else PecSched
    return kind(PolicyContext(latency=Linear(), shape=SHAPE), PecSchedOptions(**given))


def requests(rng: random.Random, count: int, gap_s: float, long_share: float = 0.1) -> list[Request]:
    """Short ones of 50 to 3,000 tokens, long ones of 11,000 to 90,000; some at the same instant."""
    made, at = [], 0.0
    for i in range(count):
        at += rng.choice((0.0, rng.expovariate(1 / gap_s)))
        long = rng.random() < long_share
        tokens = rng.randint(11_000, 90_000) if long else rng.randint(50, 3000)
        name = f"{'l' if long else 's'}{i}"
        made.append(Request(id=name, arrival_s=at, prompt_tokens=tokens, max_output_tokens=rng.choice((1, 20))))
    return made


def drilled(policy: PecSched, work: Sequence[Request], replicas: int, until_s: float = float("inf")) -> DrillResult:
    return PlacementDrill(policy, book(replicas), Linear(), layers=8, decode_s=0.5, keep_actions=True).run(
        work, until_s
    )


SETTINGS = st.fixed_dictionaries(
    {
        "mode": st.sampled_from(["paper", "default"]),
        "long_sp": st.integers(1, 8),
        "batch_tokens": st.sampled_from([500, 2000, 8000]),
        "preempt": st.booleans(),
        "colocate": st.just(True),
        "colocated_tokens": st.sampled_from([None, 600]),
        "long_replicas": st.sampled_from(["fixed", "latency"]),
        "long_target_s": st.just(1.5),
    }
)


@given(SETTINGS, st.integers(0, 10**6), st.sampled_from([8, 13]), st.sampled_from([0.004, 0.02, 0.2]))
def test_indexed_decisions_equal_literal_decisions(settings, seed: int, replicas: int, gap_s: float) -> None:  # type: ignore[no-untyped-def]
    """Same actions at the same times. Along the way the drill checks that replicas have one long request at most, that
    a group runs on all of its replicas or on none, never together with a short prefill, and that no token comes
    twice."""
    work = requests(random.Random(seed), 60, gap_s)
    fast, slow = (drilled(policy(literal, **settings), work, replicas, 40.0) for literal in (False, True))
    assert fast.actions == slow.actions
    assert fast.prefilled_s == slow.prefilled_s


@given(SETTINGS, st.integers(0, 10**6), st.sampled_from([0.02, 0.2]))
def test_every_request_ends_and_pauses_lose_no_work(settings, seed: int, gap_s: float) -> None:  # type: ignore[no-untyped-def]
    """The drill raises where a long prefill ends with more or less work done than it has."""
    work = requests(random.Random(seed), 60, gap_s)
    out = drilled(policy(**settings), work, 8)
    assert out.prefilled_s.keys() == {request.id for request in work}
    asked = sum(isinstance(action, PreemptRequest) for _, action in out.actions)
    assert out.suspensions <= asked
    assert sum(isinstance(action, ResumeRequest) for _, action in out.actions) == out.suspensions
    if not settings["preempt"]:
        assert not asked


def short(name: str, at: float, tokens: int = 1000) -> Request:
    return Request(id=name, arrival_s=at, prompt_tokens=tokens, max_output_tokens=1)


def long(name: str, at: float, tokens: int = 60_000, output: int = 1) -> Request:
    return Request(id=name, arrival_s=at, prompt_tokens=tokens, max_output_tokens=output)


def places(actions) -> dict[str, list[tuple[int, bool]]]:  # type: ignore[no-untyped-def]
    found = defaultdict(list)
    for _, action in actions:
        if isinstance(action, EnqueueRequest) and action.phase == "prefill":
            found[action.request].append((action.group[0], action.concurrent))
    return found


def test_short_prefill_is_placed_idle_then_colocated_then_preempting() -> None:
    """Four replicas, a long request on three. The first short finds the idle one, the second preempts (nothing decodes
    yet), and while the long request decodes shorts share its replicas."""
    work = [long("l", 0.0, output=100), short("a", 0.1), short("b", 0.1001), short("c", 2.3), short("d", 2.3001)]
    out = drilled(policy(batch_tokens=1500), work, 4)
    at = places(out.actions)
    assert at["a"] == [(3, False)]
    assert at["b"] == [(0, False)]
    verbs = [type(action) for _, action in out.actions]
    assert verbs[:4] == [CommitSpans, EnqueueRequest, PreemptRequest, EnqueueRequest]
    decoding_s = out.prefilled_s["l"]
    assert 2.0 < decoding_s < 2.3
    assert at["c"] == [(3, False)]
    assert at["d"] == [(0, True)]


@pytest.mark.parametrize(("mode", "place"), [("default", 3), ("paper", 0)])
def test_long_prefill_is_not_paused_when_a_free_replica_is_sooner(mode: str, place: int) -> None:
    """A layer of the long prefill takes 0.6 s, the queue of the free replica 0.1 s. The paper preempts."""
    work = [long("l", 0.0, 600_000), short("a", 0.1), short("b", 0.1001)]
    out = drilled(policy(mode=mode), work, 4)
    assert places(out.actions)["a"] == [(3, False)]
    assert places(out.actions)["b"] == [(place, False)]
    assert any(isinstance(action, PreemptRequest) for _, action in out.actions) == (mode == "paper")


def test_short_batches_are_balanced_over_the_replicas_of_a_group() -> None:
    lengths = (900, 100, 500, 400, 300, 300)
    work = [long("l", 0.0), *(short(f"s{i}", 0.3 + i * 1e-5, tokens) for i, tokens in enumerate(lengths))]
    out = drilled(policy(queue="tokens"), work, 3)
    load: dict[int, int] = defaultdict(int)
    for name, where in places(out.actions).items():
        load[where[0][0]] += lengths[int(name[1:])]
    # each short prompt joins the shortest queue: 900 | 100 + 400 + 300 | 500 + 300
    assert dict(load) == {0: 900, 1: 800, 2: 800}


def test_paused_group_takes_at_most_the_threshold_on_each_replica() -> None:
    work = [long("l", 0.0), *(short(f"s{i}", 0.3 + i * 1e-5, 1000) for i in range(9))]
    out = drilled(policy(batch_tokens=2000, queue="tokens"), work, 3)
    at_once = sum(isinstance(action, EnqueueRequest) for at_s, action in out.actions if at_s < 0.31)
    assert at_once == 6  # two a replica; the others wait in the global queue
    assert len(out.prefilled_s) == 10


def stream(gap_s: float, count: int) -> list[Request]:
    return [short(f"s{i}", 0.05 + i * gap_s, 1000) for i in range(count)]


def test_ageing_prevents_starvation_by_a_steady_stream_of_short_requests() -> None:
    """Three replicas, 0.1 s for a short prompt: one every 25 ms is more than they can do."""
    work = [long("l", 0.0), *stream(0.025, 4000)]
    literal = drilled(policy(mode="paper"), work, 3, 100.0)
    aged = drilled(policy(mode="default"), work, 3, 100.0)
    assert "l" not in literal.prefilled_s
    alone_s = 60_000 * 1e-4 / 3
    assert aged.prefilled_s["l"] < 3 * alone_s


def test_short_requests_wait_for_a_slice_not_for_the_rest_of_a_long_prefill() -> None:
    work = [long("l", 0.0, 300_000), *stream(0.07, 200)]  # 10 s of three replicas, and half of them in short requests
    out = drilled(policy(fast_sp=True), work, 3)
    waits = [out.prefilled_s[request.id] - request.arrival_s for request in work[1:]]
    assert max(waits) < 4.0  # a slice, a layer of 1.25 s, and what has piled up meanwhile


@given(st.floats(0.0, 3.0), st.integers(0, 10**6), st.floats(0.02, 0.1))
def test_ageing_bounds_suspension(ageing: float, seed: int, gap_s: float) -> None:
    """At most `ageing` times the prefill and the slice, and the batch that is there when the time is up."""
    work = [long("l", 0.0), *stream(gap_s, 400)]
    out = drilled(policy(ageing=ageing, batch_tokens=1000), work, 3)
    alone_s = 60_000 * 1e-4 / 3
    # 1 s is the default `slice_s`; 0.3 s bounds a last batch of short prompts, and a pause waits for one layer of eight
    assert out.prefilled_s["l"] <= alone_s + ageing * (alone_s + 1.0) + 0.3 + alone_s / 8


@pytest.mark.parametrize("spare_s", [-1.0, 0.5, 4.0])
def test_a_long_prefill_is_suspended_for_no_longer_than_its_target_allows(spare_s: float) -> None:
    alone_s = 60_000 * 1e-4 / 3
    tight = msgspec.structs.replace(long("l", 0.0), slo=Slo(ttft_s=alone_s + spare_s))
    out = drilled(policy(batch_tokens=1000), [tight, *stream(0.03, 200)], 3)
    # the last batch of short prompts ends, and a pause waits for the layer
    assert out.prefilled_s["l"] <= alone_s + max(0.0, spare_s) + 0.3 + alone_s / 8
    assert (out.suspensions == 0) == (spare_s < 0)


def test_long_requests_keep_their_order() -> None:
    work = [long("l0", 0.0), long("l1", 0.01), long("l2", 0.02, 20_000)]
    out = drilled(policy(), work, 5)
    # l2 is shorter and would fit earlier: it must not overtake
    begun = [action.request for _, action in out.actions if isinstance(action, CommitSpans)]
    assert begun == ["l0", "l1", "l2"]
    assert out.prefilled_s["l0"] < out.prefilled_s["l1"]


def test_fast_sp_is_chosen_where_it_is_faster() -> None:
    for fast, attn in ((True, "ulysses"), (False, "ring")):
        out = drilled(policy(fast_sp=fast), [long("l", 0.0)], 4)
        commit = next(action for _, action in out.actions if isinstance(action, CommitSpans))
        assert commit.spans[0].strategy.attn == attn


@pytest.mark.parametrize("mode", ["paper", "default"])
def test_both_modes_pause_between_layers_and_choose_by_the_cluster_s_own_model(mode: str) -> None:
    """As docs/concepts/placement.md says; the paper pauses between kernels, and chooses by formulas with faults."""
    out = drilled(policy(mode=mode), [long("l", 0.0), short("s", 0.4)], 3)
    layer_s = 60_000 * 1e-4 / 3 / 8
    # asked at 0.4 s, in the second layer of 0.25 s
    assert out.prefilled_s["s"] == pytest.approx(2 * layer_s + 1000 * 1e-4)
    commit = next(action for _, action in out.actions if isinstance(action, CommitSpans))
    assert commit.spans[0].strategy.attn == "ulysses", "`Linear` charges rings 1.3 times as much"


def test_latency_rule_takes_the_fewest_replicas_that_keep_the_target() -> None:
    out = drilled(policy(long_replicas="latency", long_target_s=1.5), [long("l", 0.0, 60_000)], 8)
    commit = next(action for _, action in out.actions if isinstance(action, CommitSpans))
    assert len(commit.spans[0].group) == 5  # 6 s on one; 1.2 s on five, and lengths count in steps of 1,024


def test_a_prompt_above_the_cap_is_not_prefilled_beside_a_long_decode() -> None:
    def beside(cap: int | None, tokens: int) -> bool:
        # One replica, held by the long prefill: the short prompt waits for the decode, or for its end.
        work = [long("l", 0.0, 60_000, output=20), short("s", 1.0, tokens)]
        out = drilled(policy(colocated_tokens=cap, preempt=False, long_sp=1), work, 1)
        assert set(out.prefilled_s) == {"l", "s"}
        return any(isinstance(a, EnqueueRequest) and a.request == "s" and a.concurrent for _, a in out.actions)

    assert beside(None, 1000)
    assert beside(1000, 1000)
    assert not beside(999, 1000)
