"""Prompts that yield are not looked at once none of them finds time; decisions are those of a policy that looks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.helpers.policy_alone import CountedPool

from headway.core.request import Request, Slo
from headway.perf.hardware.shapes import ModelShape
from headway.perf.latency.base import decode_load
from headway.perf.latency.corrected import CorrectedLatency
from headway.perf.latency.roofline import MachineRates, roofline
from headway.policy.iteration import decision
from headway.policy.iteration.candidates import PrefillCandidates
from headway.policy.iteration.chunk_allocation import PackCandidate, pack
from headway.policy.iteration.config import SchedulerConfig
from headway.policy.iteration.decision import IterationDecision, IterationPolicy

SHAPE = ModelShape(layers=32, hidden=4096, q_heads=32, kv_heads=8, head_dim=128, mlp=14336, vocab=128256)
RATES = MachineRates(linear_flops=6e13, attention_flops=5e13, bandwidth=3e12, fixed_s=1e-3, per_decode_s=2e-8, name="x")
LATENCY = roofline(SHAPE, RATES)


class SharedPrefixes:
    """A prefix cache that holds nothing, where some prompts begin as those that are computed now."""

    def __init__(self) -> None:
        self.computing: dict[str, None] = {}
        self.begins_as: dict[str, str] = {}

    def drain_changes(self) -> list[str]:
        return []

    def cached_tokens(self, request: str) -> int | None:
        return None if request in self.computing else 0

    def computed_by(self, request: str) -> str | None:
        other = self.begins_as.get(request)
        return other if other in self.computing else None

    def restored(self, request: str) -> bool:
        return False


class SharingPool(CountedPool):
    """A pool with such a cache."""

    answers_hold = False

    def __init__(self) -> None:
        super().__init__(100_000, 16)
        self.prefixes = SharedPrefixes()

    @property
    def cache(self) -> Any:
        return self.prefixes

    def pledge(self, request: str, *rest: Any) -> bool:
        pledged = bool(super().pledge(request, *rest))
        if pledged:
            self.prefixes.computing[request] = None
        return pledged


def carried_out(policy: IterationPolicy, pool: CountedPool, picked: IterationDecision) -> list[str]:
    """Compute what was picked; return the requests whose prompts are done, which end."""
    done = []
    for quota in picked.quotas:
        state = policy.holders[quota.request]
        policy.moved(quota.request, state.scheduled + quota.tokens)
        if not state.remaining:
            policy.decoding(quota.request)
            policy.ended(quota.request)
            del pool.blocks[quota.request]
            done.append(quota.request)
    policy.began()
    return done


def sharing_decisions(seed: int) -> list[Any]:
    """Quotas where short prompts begin as long ones that are computed."""
    chance, pool = random.Random(seed), SharingPool()
    config = SchedulerConfig(policy="lars", space_sharing=True, t_target_s=0.05, long_tokens=4_000)
    policy, longs, log = IterationPolicy(config, LATENCY, pool), list[str](), list[Any]()
    for step in range(40):
        for number in range(chance.choice([0, 1, 2]) if step else 6):
            prompt = chance.choice([30, chance.randint(100, 1_500), chance.randint(4_500, 9_000)])
            name = f"r{step}.{number}"
            if prompt > 4_000:
                longs.append(name)
            elif longs and chance.random() < 0.5:
                pool.prefixes.begins_as[name] = chance.choice(longs)
            slo = Slo(ttft_s=chance.choice([None, 0.1, 2.0]))
            policy.enter(Request(id=name, arrival_s=0.05 * step, prompt_tokens=prompt, max_output_tokens=4, slo=slo))
        picked = policy.pick(decode_load(LATENCY, 40, 40_000), 0.05 * step)
        log.append(picked.quotas)
        for name in carried_out(policy, pool, picked):
            del pool.prefixes.computing[name]
    return log


def decisions(seed: int, priorities: list[int] | None = None) -> list[Any]:
    """Quotas of a policy in a random world of prompts of all sizes, some of them late, beside decodes."""
    chance = random.Random(seed)
    config = SchedulerConfig(
        policy=chance.choice(["lars", "lars", "srpt"]), space_sharing=True, t_target_s=chance.choice([None, 0.05]),
        long_tokens=4_000, rho_min=chance.choice([0.0, 0.2]), stretch=chance.choice([0.0, 0.15]),
    )  # fmt: skip
    blocks = chance.choice([1_500, 100_000])
    learns = chance.random() < 0.5
    pool = CountedPool(blocks, 16)
    policy = IterationPolicy(config, CorrectedLatency(LATENCY) if learns else LATENCY, pool)
    priorities = priorities or chance.choice([[0], [0], [0, 1]])
    now, log = 0.0, list[Any]()
    for step in range(60):
        for number in range(30 if not step else chance.choice([0, 0, 1])):
            prompt = chance.choice([30, chance.randint(100, 1_500), chance.randint(1_000, 9_000)])
            slo = Slo(ttft_s=chance.choice([None, None, 0.1, 2.0]))
            policy.enter(
                Request(
                    id=f"r{step}.{number}",
                    arrival_s=now,
                    prompt_tokens=prompt,
                    max_output_tokens=4,
                    slo=slo,
                    priority=chance.choice(priorities),
                )
            )
        picked = policy.pick(decode_load(LATENCY, 40, 40_000), now)
        log.append(picked)
        carried_out(policy, pool, picked)
        if learns:
            # Slacks follow what was learned when they are asked for, and the order of the queue does not.
            policy.observed(picked.load, 0.05 * (1 + step % 7))
            asked = Request(id="x", arrival_s=now, prompt_tokens=500, max_output_tokens=1)
            log.append(policy.predicted_ttft_s(asked, decode_load(LATENCY, 40, 40_000), now))
        now += 0.05
    return log


@pytest.mark.parametrize("seed", [*range(24), 185])
@pytest.mark.parametrize("decided", [decisions, sharing_decisions])
def test_decisions_are_those_of_a_policy_that_looks_at_each(
    decided: Callable[[int], list[Any]], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = decided(seed)
    monkeypatch.setattr(PrefillCandidates, "pass_over", lambda self, yielding: None)
    assert found == decided(seed)


def test_the_largest_prompt_counts_only_while_it_is_there() -> None:
    policy = IterationPolicy(SchedulerConfig(t_target_s=0.05), LATENCY, CountedPool(100_000, 16))
    policy.enter(Request(id="large", arrival_s=0.0, prompt_tokens=100_000, max_output_tokens=4))
    policy.pick(decode_load(LATENCY, 0, 0), 0.0)
    policy.ended("large")
    assert policy.queue.most_known == 0


@pytest.mark.parametrize("seed", range(24))
def test_no_slack_is_below_an_earlier_one_by_more_than_the_margin(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def checked(load: Any, candidates: Any, yields_from: int, rules: Any, *rest: Any) -> Any:
        def each() -> Iterator[PackCandidate]:
            most = float("-inf")
            for candidate in candidates:
                assert candidate.slack >= most - rules.slack_margin
                most = max(most, candidate.slack)
                yield candidate

        return pack(load, each(), yields_from, rules, *rest)

    monkeypatch.setattr(decision, "pack", checked)
    monkeypatch.setattr(PrefillCandidates, "pass_over", lambda self, yielding: None)
    decisions(seed, priorities=[0])


def test_of_many_prompts_that_yield_only_the_first_few_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at = list[str]()
    candidate = PrefillCandidates._candidate
    monkeypatch.setattr(
        PrefillCandidates,
        "_candidate",
        lambda self, state, *rest: looked_at.append(state.request.id) or candidate(self, state, *rest),
    )
    policy = IterationPolicy(SchedulerConfig(t_target_s=0.05), LATENCY, CountedPool(100_000, 16))
    for number in range(60):
        policy.enter(Request(id=f"several{number}", arrival_s=0.0, prompt_tokens=2_000, max_output_tokens=4))
    policy.enter(Request(id="one", arrival_s=0.0, prompt_tokens=40, max_output_tokens=4))
    quotas = policy.pick(decode_load(LATENCY, 40, 40_000), 0.0).quotas
    assert [quota.request for quota in quotas] == ["several0", "one"]
    assert len(looked_at) <= 3
