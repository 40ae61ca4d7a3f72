"""Worlds from a seed: every combination of settings, arrivals and mishaps that the scheduler must survive."""

from __future__ import annotations

import random

import msgspec
from tests.helpers.scheduler_simulation import World
from tests.helpers.unit_latency import random_config

from headway.core.request import BACKGROUND_PRIORITY, Request, Slo


def background_world(seed: int) -> World:
    """The same with requests that no client waits for."""
    world, rng = random_world(seed), random.Random(f"background {seed}")
    world.plan = [
        (msgspec.structs.replace(request, priority=BACKGROUND_PRIORITY) if rng.random() < 0.5 else request, output)
        for request, output in world.plan
    ]
    return World(
        rng, world.config, world.pool_tokens, world.plan, chaos=world.chaos, losses=world.losses,
        learns=world.learns, ahead=world.ahead,
    )  # fmt: skip


def random_world(seed: int) -> World:
    """Any policy, chunking, pipeline and mode; a pool so small that decodes exhaust it; arrivals outrun service."""
    rng = random.Random(seed)
    stages = rng.choice((1, 1, 2, 3))
    config = random_config(
        rng,
        chunking=rng.choice(("adaptive", "adaptive", "static:96", "whole")),
        t_target_s=rng.choice((0.004, 0.01, 0.02)),
        max_num_seqs=rng.choice((3, 8, 64)),
        max_num_batched_tokens=rng.choice((48, 256, 2048)),
        stages=stages,
        pipeline_schedule=rng.choice(("stream", "microbatch")),
    )
    pool = rng.choice((640, 960, 1600))
    plan, at = [], 0.0
    for i in range(rng.randint(4, 18)):
        at += rng.expovariate(1 / rng.choice((0.002, 0.02, 0.1)))
        long = rng.random() < 0.3
        prompt = rng.randint(201, 560) if long else rng.randint(1, 120)
        output = rng.choice((1, rng.randint(2, 12), rng.randint(20, 80)))
        tbt_s = rng.choice((None, None, None, 0.015, 0.002))
        ttft_s = rng.choice((None, None, 0.05, 0.5))
        slo = Slo(ttft_s=ttft_s, tbt_s=tbt_s)
        priority = rng.choice((0, 0, 0, 0, -1, 3)) if seed % 3 == 0 else 0
        request = Request(
            id=f"{'L' if long else 'S'}{i}",
            arrival_s=at,
            prompt_tokens=prompt,
            max_output_tokens=min(output + rng.choice((0, 0, 20)), pool + 1 - prompt),
            slo=slo,
            priority=priority,
        )
        plan.append((request, min(output, request.max_output_tokens)))
    return World(
        rng,
        config,
        pool,
        plan,
        chaos=rng.choice((0.0, 0.0, 0.02, 0.1)),
        losses=rng.choice((0.0, 0.0, 0.005, 0.03)),
        learns=rng.random() < 0.3,
        ahead=rng.choice((1, 1, 100)),
    )
