"""`IterationPolicy` alone: the quotas that the scheduler hands out are its own."""

from __future__ import annotations

import numpy as np
import pytest
from tests.helpers.policy_alone import CountedPool, beside
from tests.helpers.random_worlds import random_world
from tests.helpers.unit_latency import small_machine

from headway.core.request import BACKGROUND_PRIORITY, Request
from headway.perf.latency.base import BatchLoad, decode_load, load_s, one_chunk_s
from headway.policy.iteration.candidates import BACKGROUND_EVERY
from headway.policy.iteration.config import SchedulerConfig
from headway.policy.iteration.decision import IterationPolicy
from headway.policy.iteration.prefill import SEVERAL_ITERATIONS


@pytest.mark.parametrize("first", range(0, 300, 50))
def test_policy_alone_gives_the_same_quotas_as_the_scheduler(first: int) -> None:
    picked = 0
    for seed in range(first, first + 50):
        world = random_world(seed)
        policy = beside(world)
        try:
            world.run()
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
        picked += policy.picked
        assert policy.pool.blocks == {}
        assert not list(policy.policy.order(world.now))
        assert policy.policy.holders == {}
    assert picked > 1000


def policy_of(pool: CountedPool, **fields: object) -> IterationPolicy:
    fields = {
        "policy": "fcfs",
        "t_target_s": 0.01,
        "newcomer_wait_s": 0.0,
        "reserve_tokens": 0,
        "long_iterations": 0.0,
        **fields,
    }
    return IterationPolicy(SchedulerConfig(**fields), small_machine(), pool)  # type: ignore[arg-type]


def request(name: str, prompt: int, **fields: object) -> Request:
    return Request(id=name, arrival_s=0.0, prompt_tokens=prompt, max_output_tokens=8, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(("priority", "yields"), [(-1, False), (0, True), (1, True)])
def test_a_long_prompt_leaves_no_time_to_shorts_of_a_lower_priority(priority: int, yields: bool) -> None:
    def quota(others: bool) -> int:
        policy = policy_of(CountedPool(1000, 16), policy="lars", rho_min=0.6, long_iterations=4.0)
        policy.enter(request("long", 4000, priority=priority))
        if others:
            policy.enter(request("short", 200))
        quotas = policy.pick(decode_load(policy.latency, 0, 0), 0.0).quotas
        return {each.request: each.tokens for each in quotas}.get("long", 0)

    assert (quota(others=True) < quota(others=False)) == yields


@pytest.mark.parametrize(("policy_name", "priority"), [("lars", 0), ("lars", -1), ("srpt", 0)])
def test_a_prompt_of_several_iterations_leaves_time_to_one_of_a_single_iteration(
    policy_name: str, priority: int
) -> None:
    def quotas(others: bool) -> dict[str, int]:
        policy = policy_of(CountedPool(1000, 16), policy=policy_name, long_iterations=4.0)
        policy.enter(request("turn", 640, priority=priority))
        policy.enter(request("other", 640))
        assert {state.size for state in policy.queue} == {SEVERAL_ITERATIONS}
        if others:
            policy.enter(request("chat", 40))
        picked = policy.pick(decode_load(policy.latency, 0, 0), 0.0).quotas
        return {each.request: each.tokens for each in picked}

    alone, beside = quotas(others=False), quotas(others=True)
    assert beside["chat"] == 40
    # under srpt the chat goes first; the turn has the rest
    assert (beside["turn"] < alone["turn"]) == (priority == 0)


@pytest.mark.parametrize("decodes", [0, 60, 105])
def test_a_prompt_of_several_iterations_goes_on_beside_decodes_and_a_stream_of_small_ones(decodes: int) -> None:
    policy = policy_of(CountedPool(100_000, 16), policy="lars", long_iterations=4.0, t_target_s=0.05)
    policy.enter(request("turn", 2500))
    load = decode_load(policy.latency, decodes, decodes * 2000)
    assert load_s(policy.latency, load) < 0.05
    (state,) = policy.queue
    assert state.size == SEVERAL_ITERATIONS
    now = 0.0
    for number in range(400):
        policy.enter(request(f"chat {number}", 30))
        picked = policy.pick(load, now)
        policy.began()
        for quota in picked.quotas:
            state_of = policy.holders[quota.request]
            policy.moved(quota.request, state_of.scheduled + quota.tokens)
        now += load_s(policy.latency, picked.load)
        if state.remaining == 0:
            break
    assert state.remaining == 0


def test_no_time_is_left_to_a_prompt_for_which_there_is_no_kv() -> None:
    policy = policy_of(CountedPool(40, 16), policy="lars", long_iterations=4.0)
    policy.enter(request("turn", 640))
    (first,) = policy.pick(decode_load(policy.latency, 0, 0), 0.0).quotas
    policy.moved("turn", 100)
    policy.enter(request("chat", 40))
    (second,) = policy.pick(decode_load(policy.latency, 0, 0), 0.0).quotas
    assert (first.request, second.request) == ("turn", "turn")
    assert second.tokens > 0.9 * first.tokens


def test_prefills_in_flight_cannot_exhaust_the_pool() -> None:
    pool = CountedPool(10, 16)
    policy = policy_of(pool)
    for name in ("one", "two", "three"):
        policy.enter(request(name, 64))
    admitted = [quota.request for quota in policy.pick(decode_load(policy.latency, 0, 0), 0.0).quotas]
    assert admitted == ["one", "two"]  # the third would need 4 of the 2 blocks that are not pledged
    assert pool.free_blocks == 2
    blocked = [state.request.id for state in policy.order(0.0) if state.skipped_since is not None]
    assert blocked == ["three"]


def test_cached_tokens_are_no_work() -> None:
    policy = policy_of(CountedPool(100, 16))
    policy.enter(request("cached", 200, cached_tokens=192))
    (quota,) = policy.pick(decode_load(policy.latency, 0, 0), 0.0).quotas
    assert (quota.request, quota.tokens) == ("cached", 8)


def test_a_preempted_request_computes_what_it_had_generated_again() -> None:
    pool = CountedPool(100, 16)
    policy = policy_of(pool)
    policy.enter(request("a", 40))
    (quota,) = policy.pick(decode_load(policy.latency, 0, 0), 0.0).quotas
    policy.moved("a", quota.tokens)
    policy.decoding("a")
    assert not list(policy.order(0.0))
    del pool.blocks["a"]
    policy.lost("a", 43)
    (quota,) = policy.pick(decode_load(policy.latency, 0, 0), 1.0).quotas
    assert quota.tokens == 43


def test_skipped_requests_get_no_tokens_and_admission_can_be_closed() -> None:
    policy = policy_of(CountedPool(100, 16))
    policy.enter(request("a", 40))
    policy.enter(request("b", 40))
    empty = decode_load(policy.latency, 0, 0)
    assert policy.pick(empty, 0.0, admits_new=False).quotas == []
    assert [quota.request for quota in policy.pick(empty, 0.0, skip={"a"}).quotas] == ["b"]
    policy.moved("b", 8)
    assert [quota.request for quota in policy.pick(empty, 0.0, admits_new=False).quotas] == ["b"]


@pytest.mark.parametrize("wait_s", [None, 0.004, 0.03])
@pytest.mark.parametrize("beside", ["nothing", "a chat", "decodes"])
def test_an_iteration_with_tokens_of_a_background_request_is_short(wait_s: float | None, beside: str) -> None:
    def iteration(priority: int) -> tuple[dict[str, int], float]:
        policy = policy_of(CountedPool(10_000, 16), t_target_s=0.05, background_wait_s=wait_s)
        policy.enter(request("document", 40_000, priority=priority))
        if beside == "a chat":
            policy.enter(request("chat", 20))
        decodes = decode_load(policy.latency, 4, 400) if beside == "decodes" else decode_load(policy.latency, 0, 0)
        decision = policy.pick(decodes, 0.0)
        return {each.request: each.tokens for each in decision.quotas}, load_s(policy.latency, decision.load)

    bound_s = 0.01 if wait_s is None else wait_s
    quotas, seconds = iteration(BACKGROUND_PRIORITY)
    others, longer_s = iteration(1)
    assert bound_s < longer_s <= 0.05
    if beside == "a chat":
        # A prompt for which a client waits has the iteration to itself.
        assert quotas == {"chat": 20}
        assert others["document"] > 8
        return
    assert quotas["document"] >= 8
    assert 0.5 * bound_s < seconds <= bound_s
    assert others["document"] > quotas["document"]


def test_what_arrivals_interrupt_has_iterations_of_its_own_and_is_never_starved() -> None:
    policy = policy_of(CountedPool(10_000, 16), t_target_s=0.05, interruptible_layers=4)
    policy.enter(request("document", 40_000, priority=BACKGROUND_PRIORITY))
    decodes, nothing = decode_load(policy.latency, 4, 400), decode_load(policy.latency, 0, 0)

    def iteration(load: BatchLoad) -> int:
        quotas = policy.pick(load, 0.0).quotas
        for each in quotas:
            policy.moved(each.request, policy.holders[each.request].scheduled + each.tokens)
        policy.began()
        return sum(each.tokens for each in quotas)

    given = [iteration(decodes) for _ in range(1000)]
    places = [place for place, tokens in enumerate(given) if tokens]
    assert len(places) == 1000 // (BACKGROUND_EVERY + 1)
    assert set(np.diff(places)) == {BACKGROUND_EVERY + 1}
    # As long as an iteration that nothing interrupts: 10 ms, of which the decodes take less than half.
    assert min(given[place] for place in places) > 100
    # Alone at once, about 1 ms a layer.
    assert 0.003 < load_s(policy.latency, policy.pick(nothing, 0.0).load) <= 0.004
    policy.enter(request("chat", 20))
    assert [each.request for each in policy.pick(nothing, 0.0).quotas] == ["chat"]


def test_an_interrupted_chunk_comes_again_of_the_same_size_where_it_is_alone() -> None:
    policy = policy_of(CountedPool(10_000, 16), t_target_s=0.05, interruptible_layers=4)
    document = policy.enter(request("document", 40_000, priority=BACKGROUND_PRIORITY))
    nothing = decode_load(policy.latency, 0, 0)
    (quota,) = policy.pick(nothing, 0.0).quotas
    policy.moved("document", quota.tokens)
    policy.began()
    before_s, left_s = document.work_s, document.total_s
    policy.interrupted("document", 0, quota.tokens)
    assert document.work_s == left_s > before_s
    # Arrivals were rare for so long that other chunks would be longer.
    (again,) = policy.pick(nothing, 60.0).quotas
    assert again == quota
    policy.moved("document", quota.tokens)
    policy.began()
    (following,) = policy.pick(nothing, 60.0).quotas
    assert following.tokens > 2 * quota.tokens


def test_the_last_chunk_of_a_prompt_may_be_interrupted() -> None:
    policy = policy_of(CountedPool(100, 16), t_target_s=0.05, interruptible_layers=4)
    policy.enter(request("document", 40, priority=BACKGROUND_PRIORITY))
    policy.pick(decode_load(policy.latency, 0, 0), 0.0)
    policy.moved("document", 40)
    assert len(policy.queue) == 0
    policy.interrupted("document", 0, 40)
    assert [state.request.id for state in policy.order(0.0)] == ["document"]
    assert policy.pick(decode_load(policy.latency, 0, 0), 0.0).quotas[0].tokens == 40


def test_background_iterations_are_longer_where_arrivals_are_rare_or_the_context_is_long() -> None:
    def seconds(now: float, done: int = 0) -> float:
        policy = policy_of(CountedPool(100_000, 16), t_target_s=None, newcomer_wait_s=None, min_chunk=1)
        policy.enter(request("document", 1_000_000, priority=BACKGROUND_PRIORITY))
        if done:
            policy.moved("document", done)
        return load_s(policy.latency, policy.pick(decode_load(policy.latency, 0, 0), now).load)

    assert seconds(0.0) <= 0.01
    # no other request has come for so long
    assert 0.03 < seconds(2.0) <= 0.04
    one_token_s = small_machine().rows_s(1) + one_chunk_s(small_machine(), 900_000, 1)
    assert one_token_s > 0.01
    assert one_token_s < seconds(0.0, 900_000) <= 2.0 * one_token_s
