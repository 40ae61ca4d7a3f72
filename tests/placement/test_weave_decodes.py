"""Short prompts that Weave prefills beside decodes: when they do, and that decodes keep their pace."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.cluster_worlds import PerToken, cluster

from headway import simulate
from headway.core.request import Request
from headway.policy.placement.base import CommitSpans, EnqueueRequest, RequestArrived
from headway.policy.placement.decode_placement import DecodePlacement
from headway.policy.placement.registry import PolicyContext, make_placement
from headway.policy.placement.view import ClusterSnapshot, ClusterState
from headway.policy.placement.weave_decodes import PrefillsBesideDecodes

DECODE = 4


def request(tokens: int = 500, output: int = 8) -> Request:
    return Request(id="short", arrival_s=0.0, prompt_tokens=tokens, max_output_tokens=output)


def world(**decode: Any) -> ClusterState:
    """Return four instances that prefill and one that decodes, with these fields."""
    spec = cluster(4, decode=1)
    book = ClusterState(spec.instances, spec.links)
    book.put(msgspec.structs.replace(book.instances[DECODE], **decode))
    return book


def chosen(
    book: ClusterState, asked: Request, wait_s: float, share: float = 0.05, decoded_s: float = 0.0
) -> int | None:
    """Return where a prompt goes at `decoded_s`, that would have its first token `wait_s` later elsewhere."""
    beside = PrefillsBesideDecodes(PerToken(), share, DecodePlacement())
    beside.note(ClusterSnapshot(book, 0.0))
    view = ClusterSnapshot(book, decoded_s)
    beside.note(view)
    return beside.choose(asked, decoded_s + wait_s, view)


def test_a_prompt_that_would_wait_prefills_on_an_instance_that_decodes() -> None:
    spec = cluster(4, decode=1)
    book = ClusterState(spec.instances, spec.links)
    for i in range(4):
        book.put(msgspec.structs.replace(book.instances[i], free_at_s=3.0))
    for share, where in ((0.05, DECODE), (0.0, 0)):
        context = PolicyContext(latency=PerToken(), shape=spec.shape)
        policy = make_placement("weave", context, {"beside_decodes": share, "sizes": [1]})
        (action,) = policy.on_event(RequestArrived(request()), ClusterSnapshot(book, 0.0))[:1]
        assert isinstance(action, EnqueueRequest | CommitSpans)
        group = action.group if isinstance(action, EnqueueRequest) else action.spans[0].group
        assert group == (where,)


def test_it_gains_at_least_a_tenth_of_a_second_and_decodes_there() -> None:
    assert chosen(world(), request(), 0.59) is None
    assert chosen(world(), request(), 0.61) == DECODE
    assert chosen(world(), request(1100), 9.0) is None, "longer than a second"
    assert chosen(world(), request(output=1), 9.0) is None, "nothing to decode"
    assert chosen(world(used=63_700), request(), 9.0) is None, "no room for its KV"
    assert chosen(world(capacity=0), request(), 9.0) == DECODE, "room is not stated"
    assert chosen(world(free_at_s=1.0, running=1), request(), 1.59) is None, "behind another prefill"


def test_decodes_lose_only_what_they_have_earned() -> None:
    assert chosen(world(running=2), request(), 9.0) is None, "they have decoded for no time yet"
    assert chosen(world(running=2), request(), 9.0, decoded_s=9.0) is None
    assert chosen(world(running=2), request(), 9.0, decoded_s=11.0) == DECODE
    assert chosen(world(running=20), request(), 9.0, decoded_s=1000.0) is None, "no more than five seconds are saved"


@given(st.lists(st.tuples(st.floats(0.01, 2.0), st.integers(0, 6), st.integers(10, 900)), max_size=60))
def test_time_beside_prefills_stays_within_the_share(steps: list[tuple[float, int, int]]) -> None:
    """However many decode, and whenever prompts come, as long as no decode joins while a prefill runs."""
    book, beside, now, share = world(), PrefillsBesideDecodes(PerToken(), 0.1, DecodePlacement()), 0.0, 0.1
    decoded_s = spent_s = 0.0
    for seconds, wanted, tokens in steps:
        instance = book.instances[DECODE]
        beside_s = max(0.0, min(seconds, instance.free_at_s - now))
        # the prompt decodes too, after its prefill
        spent_s += max(0, instance.running - 1) * beside_s
        decoded_s += instance.running * seconds
        now += seconds
        running = wanted if instance.free_at_s <= now else min(instance.running, max(1, wanted))
        book.put(msgspec.structs.replace(instance, running=running))
        view = ClusterSnapshot(book, now)
        beside.note(view)
        if beside.choose(request(tokens), now + 100.0, view) is not None:
            ends_s = max(now, instance.free_at_s) + tokens * 1e-3
            book.put(msgspec.structs.replace(instance, running=running + 1, free_at_s=ends_s))
            beside.note(ClusterSnapshot(book, now))
        assert spent_s <= share * decoded_s + 1e-6


@pytest.mark.long
def test_shorts_wait_less_and_decodes_keep_their_pace() -> None:
    """Prompts of 1K to 125K in bursts on six A100s that prefill: shorts waited longer than where all eight do, while
    the two that decode had little to do."""

    def run(share: float) -> tuple[float, float]:
        shorts, gaps = [], []
        for seed in range(10, 14):
            scenario = {
                "name": "beside", "model": "llama-3-8b", "latency": {"source": "roofline"},
                "policy": {"policy": "lars", "chunking": "adaptive", "t_target_s": 0.25},
                "cluster": {"accelerator": "a100-80gb", "placement": "weave", "options": {"beside_decodes": share},
                            "pools": [{"role": "prefill", "count": 6}, {"role": "decode", "count": 2}]},
                "workload": {"preset": "mooncake-like", "arrivals": "gamma", "cv": 5, "qps": 1.0, "requests": 400,
                             "max_output": 64},
            }  # fmt: skip
            records = simulate(scenario, seed=seed).records
            shorts += [r.token_s[0] - r.arrival_s for r in records if r.prompt_tokens <= 8192]
            gaps += [np.diff(r.token_s) for r in records]
        return float(np.percentile(shorts, 99)), float(np.percentile(np.concatenate(gaps), 99))

    (wait_s, gap_s), (before_s, gap_before_s) = run(0.02), run(0.0)
    assert wait_s < before_s
    assert gap_s <= 1.05 * gap_before_s
