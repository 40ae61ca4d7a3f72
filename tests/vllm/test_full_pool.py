"""A KV pool that stays full: every step computes something, and every request ends."""

from __future__ import annotations

import random

import pytest
from tests.helpers.unit_latency import small_machine

from headway.core.request import Request
from headway.policy.hosted.settings import VllmSettings
from headway.sim.spec import VllmSpec
from headway.sim.vllm.engine import PluggedPolicy
from headway.sim.vllm.scheduler import VllmRequestState, VllmScheduler

STEPS = 5_000


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_steps_at_a_full_pool_are_never_empty(prefix_caching: bool) -> None:
    """Sixteen requests always wait, KV runs short, and vLLM preempts: an empty step would repeat for ever."""
    spec = VllmSpec(
        num_blocks=96, max_num_batched_tokens=256, max_num_seqs=32, async_scheduling=False,
        enable_prefix_caching=prefix_caching,
    )  # fmt: skip
    scheduler = VllmScheduler(spec)
    PluggedPolicy(scheduler, VllmSettings().scheduler_config(32, 256, 1, 1), small_machine())
    rng, now, number, preempted, used = random.Random(0), 0.0, 0, 0, 0
    for step in range(STEPS):
        while len(scheduler.waiting) < 16:
            prompt, output = rng.choice((20, 40, 90, 300)), rng.choice((60, 200, 300))
            name = f"r{number}"
            facts = Request(id=name, arrival_s=now, prompt_tokens=prompt, max_output_tokens=output)
            scheduler.add(VllmRequestState(facts, output))
            number += 1
        done = scheduler.schedule(now)
        assert done.tokens, f"step {step} is empty"
        preempted += len(done.preempted)
        used += scheduler.pool.free_blocks < 12
        now += 0.01
        scheduler.update(done, now)
    assert preempted > 60
    assert used > STEPS // 2, used
