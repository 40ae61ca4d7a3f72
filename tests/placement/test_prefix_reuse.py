"""Placements that see hits: where a cached prefix lies, what its copy takes, and what plans make of it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from tests.helpers.cluster_worlds import TETRIS_CONTEXT, TETRIS_LINKS, lines_into
from tests.helpers.present import present

from headway.control.backend import ActionImpossible
from headway.control.dispatch import check_capable
from headway.control.log import replay
from headway.core.request import Request
from headway.perf.hardware import LINKS
from headway.perf.latency.groups import GroupShape
from headway.policy.placement.contract import (
    HTTP_CAPABILITIES,
    NATIVE_CAPABILITIES,
    Action,
    CachedPrefix,
    ClusterInstance,
    ClusterLinks,
    ClusterSnapshot,
    ClusterState,
    CommitSpans,
    EnqueueRequest,
    RequestArrived,
)
from headway.policy.placement.kv_places import cheapest_start, copy_seconds, longest_prefix
from headway.policy.placement.registry import make_placement
from headway.sim.cluster.build import cluster_of, placement_of
from headway.sim.cluster.simulation import simulate_cluster
from headway.sim.metrics import ttft_s
from headway.sim.result import SimResult
from headway.sim.scenario import parse_scenario
from headway.sim.workload import TraceRequest
from headway.sim.workload.traces import PromptText, TextPiece

ALONE = GroupShape(1)


def slow(times: float) -> ClusterLinks:
    across = msgspec.structs.replace(LINKS["ib-200"], bytes_per_s=LINKS["ib-200"].bytes_per_s / times)
    return ClusterLinks(inside=across, across=across)


def state_of(links: ClusterLinks = TETRIS_LINKS, prefill: int = 4, decode: int = 1) -> ClusterState:
    roles = ["prefill"] * prefill + ["decode"] * decode
    instances = [ClusterInstance(id=i, node=i // 4, role=role, capacity=400_000) for i, role in enumerate(roles)]
    return ClusterState(instances, links)


def asked(tokens: int) -> Request:
    return Request(id="r0", arrival_s=0.0, prompt_tokens=tokens, max_output_tokens=5)


def decided(
    name: str,
    tokens: int,
    cached: tuple[int, ...],
    links: ClusterLinks = TETRIS_LINKS,
    *,
    live: bool = False,
    free_at_s: tuple[float, ...] = (),
    **options: Any,
) -> Action:
    """Return the decision. `live`: of instances that copy no prefixes. `free_at_s`: when each is free."""
    state = state_of(links)
    for i, at_s in enumerate(free_at_s):
        state.put(msgspec.structs.replace(state.instances[i], free_at_s=at_s))
    context = msgspec.structs.replace(TETRIS_CONTEXT, copies_prefixes=not live)
    policy = make_placement(name, context, {"affinity": True, **options})
    action, *_ = policy.on_event(RequestArrived(asked(tokens), cached), ClusterSnapshot(state, 0.0))
    if live:
        check_capable(action, NATIVE_CAPABILITIES)
    return action


def planned(name: str, tokens: int, cached: tuple[int, ...], *more: Any, **fields: Any) -> CommitSpans:
    """Return the decision, which has to be spans."""
    action = decided(name, tokens, cached, *more, **fields)
    assert isinstance(action, CommitSpans)
    return action


# -- costs ---------------------------------------------------------------------------------------------------------


def test_a_copy_is_charged_with_what_the_group_lacks_over_the_slowest_link() -> None:
    view, per_token = ClusterSnapshot(state_of(), 0.0), TETRIS_CONTEXT.shape.kv_bytes_per_token
    assert copy_seconds(1000, 4, (4,), view, TETRIS_CONTEXT) == 0.0
    assert copy_seconds(0, 4, (0,), view, TETRIS_CONTEXT) == 0.0
    assert copy_seconds(1000, 4, (0,), view, TETRIS_CONTEXT) == TETRIS_LINKS.across.transfer_s(1000 * per_token)
    assert copy_seconds(1000, 1, (0,), view, TETRIS_CONTEXT) == TETRIS_LINKS.inside.transfer_s(1000 * per_token)
    assert copy_seconds(1000, 1, (0, 1, 2, 3), view, TETRIS_CONTEXT) == TETRIS_LINKS.inside.transfer_s(750 * per_token)


def test_the_faster_of_copy_and_recomputation_is_chosen() -> None:
    assert longest_prefix((0, 64, 64)) == CachedPrefix(1, 64)
    assert longest_prefix(()) is None
    request, view = asked(20_000), ClusterSnapshot(state_of(), 0.0)
    start = cheapest_start(request, (0, 6400, 0, 0, 12_800), 1, view, TETRIS_CONTEXT)
    copy_s = copy_seconds(6400, 4, (1,), view, TETRIS_CONTEXT)  # what instance 1 has is not sent
    assert start.prefix == CachedPrefix(4, 12_800, copy_s)
    # attention still reads the prefix
    behind_s = TETRIS_CONTEXT.latency.prefill_s(12_800, 7200, ALONE)
    assert start.seconds == copy_s + behind_s
    assert behind_s > TETRIS_CONTEXT.latency.prefill_s(0, 7200, ALONE)
    over_slow_links = cheapest_start(
        request, (0, 6400, 0, 0, 12_800), 1, ClusterSnapshot(state_of(slow(1e4)), 0.0), TETRIS_CONTEXT
    )
    assert over_slow_links.prefix == CachedPrefix(1, 6400)
    assert cheapest_start(request, (), 1, view, TETRIS_CONTEXT).prefix is None


# -- plans ---------------------------------------------------------------------------------------------------------


def test_plans_begin_behind_a_prefix_that_is_copied_in_time() -> None:
    action = planned("tetris", 100_000, (0, 0, 0, 0, 64_000))
    assert action.spans[0].start == 64_000
    view = ClusterSnapshot(state_of(), 0.0)
    copy_s = copy_seconds(64_000, 4, action.spans[0].group, view, TETRIS_CONTEXT)
    assert action.prefix == CachedPrefix(4, 64_000, copy_s)
    for whole in (
        planned("tetris", 100_000, (0, 0, 0, 0, 64_000), slow(1e4)),
        planned("tetris", 100_000, (0, 0, 0, 0, 64_000), affinity=False),
    ):
        assert (whole.spans[0].start, whole.prefix) == (0, None)


def test_pecsched_counts_uncached_tokens() -> None:
    planned("pecsched", 60_000, ())
    short = decided("pecsched", 60_000, (0, 0, 40_000, 0, 0))  # 20,000 are left: below `long_tokens`
    assert isinstance(short, EnqueueRequest)
    assert (short.group, short.prefix) == ((2,), CachedPrefix(2, 40_000))
    long = planned("pecsched", 100_000, (0, 0, 40_000, 0, 0))
    assert long.spans[0].start == 40_000
    assert (present(long.prefix).copy_s > 0) == (long.spans[0].group != (2,))
    assert planned("pecsched", 100_000, (0, 0, 0, 0, 40_000), slow(1e4)).spans[0].start == 0


def test_pecsched_keeps_requests_long_that_no_replica_holds_alone() -> None:
    assert len(planned("pecsched", 450_000, (0, 0, 0, 0, 449_984)).spans[0].group) > 1


# -- live: nothing is copied -----------------------------------------------------------------------------------------


def test_live_plans_begin_where_the_prefix_is() -> None:
    # What is left takes less than the others are busy: the instance that has the prefix computes it alone.
    alone = planned("tetris", 100_000, (0, 0, 99_000, 0, 99_968), live=True, free_at_s=(5.0, 5.0, 0.0, 5.0))
    assert [(span.start, span.end, span.group) for span in alone.spans] == [(99_000, 100_000, (2,))]
    assert alone.prefix == CachedPrefix(2, 99_000)
    # Much is left: a group, which the prefix is spread over as any earlier chunk.
    group = planned("tetris", 300_000, (0, 0, 64_000, 0, 0), live=True)
    assert (group.spans[0].start, group.prefix) == (64_000, CachedPrefix(2, 64_000))
    assert 2 in group.spans[0].group
    assert len(group.spans[-1].group) > 1
    # Where it is busy for longer than computing all of it elsewhere takes, the prefix is of no use.
    busy = planned("tetris", 100_000, (0, 0, 90_000, 0, 0), live=True, free_at_s=(0.0, 0.0, 500.0))
    assert (busy.spans[0].start, busy.prefix) == (0, None)
    assert 2 not in busy.spans[0].group
    # Only instances that prefill count.
    decode = planned("tetris", 100_000, (0, 0, 0, 0, 99_000), live=True)
    assert (decode.spans[0].start, decode.prefix) == (0, None)


def test_live_pecsched_begins_long_requests_behind_a_prefix_of_their_group() -> None:
    # A long request's own replicas, by its uncached tokens.
    holder = planned("pecsched", 300_000, (0,) * 5, live=True).spans[0].group[0]
    inside = planned("pecsched", 300_000, tuple(100_000 * (i == holder) for i in range(5)), live=True)
    assert holder in inside.spans[0].group
    assert (inside.spans[0].start, inside.prefix) == (100_000, CachedPrefix(holder, 100_000))
    outside = planned("pecsched", 300_000, (0, 0, 0, 0, 100_000), live=True)
    assert (outside.spans[0].start, outside.prefix) == (0, None)


def test_instances_without_copies_copy_nothing() -> None:
    remote = EnqueueRequest("r0", (0,), prefix=CachedPrefix(4, 640, 0.1))
    here = EnqueueRequest("r0", (0,), prefix=CachedPrefix(0, 640))
    for has in (NATIVE_CAPABILITIES, HTTP_CAPABILITIES):
        with pytest.raises(ActionImpossible, match="copy no cached prefixes"):
            check_capable(remote, has)
        check_capable(here, has)


# -- simulation ----------------------------------------------------------------------------------------------------


def run(placement: str, prompt: int, links: float = 1.0, **options: Any) -> tuple[SimResult, list[bytes], Any]:
    """Simulate ten requests with the same text, far apart, and one that shares half of it."""
    pools = [{"count": 3}] if placement == "jsq" else [{"count": 3, "role": "prefill"}, {"count": 1, "role": "decode"}]
    scenario = parse_scenario(
        {
            "cluster": {"placement": placement, "options": options, "pools": pools},
            "prefix_cache": {},
            "workload": {"mix": [{"prompt": "fixed:2000", "output": "fixed:20"}], "requests": 1},
        }
    )
    text = PromptText((TextPiece(prompt // 2, 1), TextPiece(prompt, 2)))
    half = PromptText((TextPiece(prompt // 2, 1), TextPiece(prompt, 3)))
    requests = [TraceRequest(100.0 * i, prompt, 20, text=text) for i in range(10)]
    requests.append(TraceRequest(1000.0, prompt, 20, text=half))
    spec = cluster_of(scenario, requests)
    if links != 1.0:
        spec = replace(spec, links=slow(links))
    lines: list[bytes] = []
    result = simulate_cluster(spec, placement_of(scenario, spec), requests, record=lines_into(lines))
    assert all(record.ok for record in result.sim.records)
    return result.sim, lines, (scenario, spec)


@pytest.mark.parametrize("placement", ["jsq", "tetris", "ladder", "pecsched"])
@pytest.mark.parametrize("prompt", [4096, 65_536])
def test_hits_shorten_prefills_wherever_they_are(placement: str, prompt: int) -> None:
    options = {} if placement == "ladder" else {"affinity": True}
    sim, lines, (scenario, spec) = run(placement, prompt, **options)
    block = spec.engine([spec.instances[0]]).block_tokens
    whole = (prompt - 1) // block * block
    assert [record.cached_tokens for record in sim.records] == [0] + [whole] * 9 + [prompt // 2]
    first, *others, half = [ttft_s(record) or 0.0 for record in sim.records]
    assert max(others) < half < first
    use = sim.use_json()["prefix_cache"]
    assert use["queried_tokens"] == 11 * prompt
    assert use["hit_tokens"] == 9 * whole + prompt // 2
    # every decision is a function of its log
    assert replay(lines, lambda about: placement_of(scenario, spec))[1] is None


def test_the_simulator_charges_copies_and_what_is_not_worth_one_is_computed() -> None:
    sim, lines, _ = run("tetris", 65_536, 4.0, affinity=True)
    commits: dict[str, float] = {}
    for line in lines:
        for _, fields in json.loads(line).get("actions", ()):
            if "prefix" in fields:
                commits[fields["request"]] = fields["prefix"]["copy_s"]
    assert max(commits.values()) > 0.5
    for record in sim.records:
        copy_s = commits.get(record.id, 0.0)
        assert (ttft_s(record) or 0.0) > copy_s
    never, _, _ = run("tetris", 65_536, 1e5, affinity=True)
    unseen, _, _ = run("tetris", 65_536, 1e5)
    assert [record.cached_tokens for record in never.records] == [record.cached_tokens for record in unseen.records]
    assert sum(ttft_s(record) or 0.0 for record in sim.records) < sum(ttft_s(r) or 0.0 for r in unseen.records)
