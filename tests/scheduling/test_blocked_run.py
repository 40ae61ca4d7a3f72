"""What one decision keeps for the next: requests for which the pool has no room are not looked at one by one again.

The decisions are those of a policy that keeps nothing, in random worlds."""

from __future__ import annotations

import random
from typing import Any

import pytest

from headway.core.request import Request, Slo
from headway.perf.hardware.shapes import ModelShape
from headway.perf.latency.base import decode_load
from headway.perf.latency.roofline import MachineRates, roofline
from headway.policy.hosted.reserved_kv_pool import ReservedKvPool
from headway.policy.iteration.config import SchedulerConfig
from headway.policy.iteration.decision import IterationPolicy

SHAPE = ModelShape(layers=32, hidden=4096, q_heads=32, kv_heads=8, head_dim=128, mlp=14336, vocab=128256)
RATES = MachineRates(linear_flops=6e13, attention_flops=5e13, bandwidth=3e11, fixed_s=1e-3, per_decode_s=2e-8, name="x")
BLOCK = 16


class World:
    """A policy over a pool that is too small for all that wait; blocks come and go with what is computed."""

    def __init__(self, seed: int, keeps: bool) -> None:
        self.chance = chance = random.Random(seed)
        self.keeps = keeps
        self.blocks = chance.choice([300, 2_000])
        self.used: dict[str, int] = {}
        self.asked: list[tuple[str, int]] = []
        self.longest = 0
        pool = ReservedKvPool(self.blocks, self.blocks * BLOCK, self._free, self._needed)
        config = SchedulerConfig(
            policy=chance.choice(["lars", "lars", "srpt", "fcfs"]), t_target_s=chance.choice([None, 0.03]),
            max_num_seqs=chance.choice([4, 200]), admission_age_s=chance.choice([0.5, 5.0]),
            kv_headroom=chance.choice([0.0, 0.1]), reserve_tokens=BLOCK,
        )  # fmt: skip
        self.policy = IterationPolicy(config, roofline(SHAPE, RATES), pool)
        self.pool = pool
        self.priorities = chance.choice([[0], [0], [0, 1]])
        self.now = 0.0
        self.log: list[Any] = []

    def _free(self) -> int:
        return self.blocks - sum(self.used.values())

    def _needed(self, name: str, tokens: int) -> int:
        self.asked.append((name, tokens))
        return -(-tokens // BLOCK) - self.used.get(name, 0)

    def arrive(self, number: int) -> None:
        chance = self.chance
        prompt = min(chance.choice([1, 40, 900, 3_000, 9_000, 20_000]), (self.blocks - 2) * BLOCK)
        slo = Slo(ttft_s=chance.choice([None, None, 0.2, 30.0]))
        request = Request(
            id=f"r{number}", arrival_s=self.now, prompt_tokens=prompt, max_output_tokens=9, slo=slo,
            priority=chance.choice(self.priorities),
        )  # fmt: skip
        self.policy.enter(request)

    def step(self) -> None:
        policy, chance = self.policy, self.chance
        if not self.keeps:
            policy.candidates._run = None
        decodes = chance.choice([0, 3])
        load = decode_load(policy.latency, decodes, 500 * decodes)
        decision = policy.pick(load, self.now, admits_new=chance.random() < 0.95)
        self.log.append((self.now, [(q.request, q.tokens) for q in decision.quotas], list(self.asked)))
        self.asked.clear()
        for quota in decision.quotas:
            name, state = quota.request, policy.holders[quota.request]
            end = state.scheduled + quota.tokens
            self.used[name] = -(-end // BLOCK)
            policy.moved(name, end)
            if state.remaining:
                self.pool.settle(name)
            else:
                policy.decoding(name)
                self.pool.complete(name)
        policy.began()
        for name, state in list(policy.holders.items()):
            lost = chance.random()
            if state.remaining == 0 and lost < 0.1:
                self.used.pop(name)
                self.pool.drop(name)
                policy.ended(name)
            elif state.remaining == 0 and lost < 0.11:
                self.used.pop(name)
                self.pool.drop(name)
                policy.lost(name, state.prompt + 1)
        self.now += chance.choice([0.001, 0.03, 0.2])


def played(seed: int, keeps: bool) -> World:
    world = World(seed, keeps)
    for number in range(150):
        if number < 90 and (number < 60 or world.chance.random() < 0.2):
            world.arrive(number)
        if number > 40:
            for _ in range(8):
                world.step()
    return world


@pytest.mark.parametrize("seed", range(12))
def test_a_policy_that_keeps_blocked_requests_decides_as_one_that_does_not(seed: int) -> None:
    kept, plain = played(seed, keeps=True), played(seed, keeps=False)
    assert kept.log == plain.log
    assert sum(bool(quotas) for _, quotas, _ in kept.log) > 50


def test_while_answers_hold_the_queue_is_not_ordered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(1, keeps=True)
    world.chance.seed(0)
    for number in range(60):
        world.arrive(number)
    queue = world.policy.queue
    ordered, calls = queue.ordered, 0

    def counted(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        return ordered(*args)

    monkeypatch.setattr(queue, "ordered", counted)
    load = decode_load(world.policy.latency, 0, 0)
    for _ in range(40):
        decision = world.policy.pick(load, world.now)
        for quota in decision.quotas:
            state = world.policy.holders[quota.request]
            world.policy.moved(quota.request, min(state.scheduled + quota.tokens, state.prompt - 1))
        world.policy.began()
        world.now += 1e-3
    assert calls < 20
