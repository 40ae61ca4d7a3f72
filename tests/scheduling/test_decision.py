"""`IterationPolicy` alone: the quotas that the scheduler hands out are its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.helpers.unit_latency import Linear, small_machine
from tests.scheduling.policy_alone import CountedPool

from headway.core.request import BACKGROUND_PRIORITY, Request, Slo
from headway.perf.latency.base import BatchLoad, decode_load, load_s
from headway.policy.iteration.budget import BACKGROUND_WAIT_S
from headway.policy.iteration.config import SchedulerConfig
from headway.policy.iteration.decision import IterationPolicy
from headway.policy.iteration.fill import PROGRESS_EVERY
from headway.policy.iteration.medha import SEVERAL, MedhaConfig


def policy_of(pool: CountedPool, **fields: object) -> IterationPolicy:
    return IterationPolicy(SchedulerConfig(**{"policy": "fcfs", "t_target_s": 0.01, **fields}), small_machine(), pool)


NOTHING = BatchLoad()


def picked(policy: IterationPolicy, now: float = 0.0, load: BatchLoad = NOTHING, **more: Any) -> dict[str, int]:
    """The tokens of each request that gets some, in order, beside a load."""
    return dict(policy.pick(load, now, **more).quotas)


def compute(policy: IterationPolicy, quotas: dict[str, int]) -> None:
    """An iteration with these quotas."""
    for name, tokens in quotas.items():
        policy.moved(name, policy.holders[name].scheduled + tokens)
    policy.began()


def request(name: str, prompt: int, **fields: object) -> Request:
    return Request(id=name, arrival_s=0.0, prompt_tokens=prompt, max_output_tokens=8, **fields)


MEDHA = MedhaConfig(long_iterations=4.0)


@pytest.mark.parametrize("mode", ["default", "paper"])
def test_under_medhas_rules_a_long_prompt_leaves_time_to_shorts(mode: str) -> None:
    def quota(others: bool) -> int:
        rules = MedhaConfig(mode=mode, long_iterations=4.0)
        policy = policy_of(CountedPool(1000, 16), policy="lars", medha=rules)
        policy.enter(request("long", 4000))
        if others:
            policy.enter(request("short", 200))
        return picked(policy).get("long", 0)

    # As printed it yields whether or not a short one waits.
    assert (quota(others=True) < quota(others=False)) == (mode == "default")


@pytest.mark.parametrize("policy_name", ["lars", "srpt"])
def test_under_medhas_rules_a_prompt_of_several_iterations_leaves_time_to_one_of_a_single_iteration(
    policy_name: str,
) -> None:
    def quotas(others: bool) -> dict[str, int]:
        policy = policy_of(CountedPool(1000, 16), policy=policy_name, medha=MEDHA)
        policy.enter(request("turn", 640))
        policy.enter(request("other", 640))
        assert {state.medha_size for state in policy.queue} == {SEVERAL}
        if others:
            policy.enter(request("chat", 40))
        return picked(policy)

    alone, beside = quotas(others=False), quotas(others=True)
    assert beside["chat"] == 40
    assert beside["turn"] < alone["turn"]


def test_no_time_is_left_to_a_prompt_for_which_there_is_no_kv() -> None:
    policy = policy_of(CountedPool(40, 16), policy="lars", medha=MEDHA)
    policy.enter(request("turn", 640))
    first = picked(policy)
    policy.moved("turn", 100)
    policy.enter(request("chat", 40))
    second = picked(policy)
    assert [*first] == [*second] == ["turn"]
    assert second["turn"] > 0.9 * first["turn"]


@pytest.mark.parametrize("decodes", [0, 32])
def test_a_cut_chunk_is_efficient_where_no_target_was_asked_for(decodes: int) -> None:
    """Least 80% of the best rate at its depth, behind a short prompt and beside decodes."""
    policy = policy_of(CountedPool(100_000, 16), policy="ladder", t_target_s=None)
    efficient = policy.budget.chunks
    for number in range(30):
        policy.enter(request(f"short {number}", 60))
    policy.enter(request("document", 200_000))
    load, cut = decode_load(policy.latency, decodes, decodes * 4000), 0
    for step in range(60):
        quotas = picked(policy, 0.01 * step, load)
        if "document" in quotas:
            cut += 1
            assert quotas["document"] >= efficient.least_tokens(policy.holders["document"].scheduled)
        compute(policy, quotas)
    assert cut > 10


@pytest.mark.parametrize("others", [0, 100])
def test_a_chunk_of_a_document_gives_way_to_a_prompt_that_completes_where_few_wait_and_not_twice(others: int) -> None:
    """Where many wait, all gain what one iteration costs less than two: the document has its chunk."""
    policy = policy_of(CountedPool(1_000_000, 16), policy="ladder", t_target_s=None)
    policy.enter(request("document", 200_000))
    for number in range(others):
        policy.enter(request(f"other {number}", 100_000))
    computed = []
    for step in range(4):
        policy.enter(request(f"chat {step}", 60))
        computed.append(picked(policy, 0.01 * step))
        compute(policy, computed[-1])
    assert all(f"chat {step}" in names for step, names in enumerate(computed))
    assert [len(names) > 1 for names in computed] == ([True] * 4 if others else [False, True] * 2)


def test_an_asked_for_target_allows_less_efficient_chunks() -> None:
    model = Linear(row_s=1e-3, fixed_s=0.05)
    policy = IterationPolicy(SchedulerConfig(), model, CountedPool(100_000, 16))
    policy.enter(request("reader", 20, slo=Slo(tbt_s=0.16)))
    picked(policy)
    policy.moved("reader", 20)
    policy.decoding("reader")
    policy.enter(request("document", 50_000))
    beside, least = decode_load(model, 1, 30), policy.budget.chunks.least_tokens(0)
    assert picked(policy, 0.0, beside)["document"] < least
    policy.ended("reader")
    assert picked(policy, 0.0, beside)["document"] >= least


def test_the_order_of_the_ladder_beside_that_of_arrival() -> None:
    policy = policy_of(CountedPool(100_000, 16), policy="ladder", t_target_s=0.01)
    policy.enter(request("document", 40_000))
    policy.enter(request("chat", 30))
    policy.enter(request("urgent", 300, priority=-1))
    assert [state.request.id for state in policy.order(0.0)] == ["urgent", "chat", "document"]


def test_prefills_in_flight_cannot_exhaust_the_pool() -> None:
    pool = CountedPool(12, 16)
    policy = policy_of(pool)
    for name in ("one", "two", "three"):
        policy.enter(request(name, 64))
    assert [*picked(policy)] == ["one", "two"]  # the third would need 5 of the 2 blocks that are not pledged
    assert pool.free_blocks == 2
    blocked = [state.request.id for state in policy.order(0.0) if state.skipped_since is not None]
    assert blocked == ["three"]


def test_skipped_requests_get_no_tokens_and_admission_can_be_closed() -> None:
    policy = policy_of(CountedPool(100, 16))
    policy.enter(request("a", 40))
    policy.enter(request("b", 40))
    assert picked(policy, admits_new=False) == {}
    assert [*picked(policy, skip={"a"})] == ["b"]
    policy.moved("b", 8)
    assert [*picked(policy, admits_new=False)] == ["b"]


@pytest.mark.parametrize("beside", ["nothing", "a chat", "decodes"])
def test_an_iteration_with_tokens_of_a_background_request_is_short(beside: str) -> None:
    def iteration(priority: int) -> tuple[dict[str, int], float]:
        policy = policy_of(CountedPool(10_000, 16), t_target_s=0.05)
        policy.enter(request("document", 40_000, priority=priority))
        if beside == "a chat":
            policy.enter(request("chat", 20))
        decodes = decode_load(policy.latency, 4, 400) if beside == "decodes" else decode_load(policy.latency, 0, 0)
        # An iteration without tokens of the document: it gives way to prompts that complete once, not twice.
        policy.began()
        decision = policy.pick(decodes, 0.0)
        return decision.quotas, load_s(policy.latency, decision.load)

    quotas, seconds = iteration(BACKGROUND_PRIORITY)
    others, longer_s = iteration(1)
    assert longer_s > BACKGROUND_WAIT_S
    if beside == "a chat":
        # A prompt for which a client waits has the iteration to itself.
        assert quotas == {"chat": 20}
        assert others["document"] > 8
        return
    assert quotas["document"] >= 8
    assert 0.5 * BACKGROUND_WAIT_S < seconds <= BACKGROUND_WAIT_S
    assert others["document"] > quotas["document"]


def test_a_background_request_advances_though_others_never_stop_to_decode() -> None:
    policy = policy_of(CountedPool(10_000, 16), t_target_s=0.05)
    policy.enter(request("document", 40_000, priority=BACKGROUND_PRIORITY))
    # The decodes alone take longer than an iteration with its tokens should.
    decodes = decode_load(policy.latency, 100, 100_000)
    assert BACKGROUND_WAIT_S < load_s(policy.latency, decodes) < 0.04
    given = []
    for _ in range(100):
        quotas = picked(policy, 0.0, decodes)
        compute(policy, quotas)
        given.append(sum(quotas.values()))
    places = [place for place, tokens in enumerate(given) if tokens]
    assert len(places) >= 10
    assert max(np.diff(places)) <= PROGRESS_EVERY + 1
    # A prompt for which a client waits goes first.
    policy.enter(request("chat", 20))
    assert next(iter(picked(policy, 0.0, decodes))) == "chat"


def test_background_iterations_are_longer_where_arrivals_are_rare_or_the_context_is_long() -> None:
    def seconds(now: float, done: int = 0) -> float:
        policy = policy_of(CountedPool(100_000, 16), t_target_s=None, min_chunk=1)
        policy.enter(request("document", 1_000_000, priority=BACKGROUND_PRIORITY))
        if done:
            policy.moved("document", done)
        return load_s(policy.latency, policy.pick(decode_load(policy.latency, 0, 0), now).load)

    assert seconds(0.0) <= 0.01
    # no other request has come for so long
    assert 0.03 < seconds(2.0) <= 0.04
    one_token_s = small_machine().rows_s(1) + small_machine().attention_s(900_000, 1)
    assert one_token_s > 0.01
    assert one_token_s < seconds(0.0, 900_000) <= 2.0 * one_token_s
