"""Small simulations from a seed: an instance, a workload and a way to run it."""

from __future__ import annotations

import random

from tests.helpers.unit_latency import small_machine

from headway.policy.iteration.config import SchedulerConfig
from headway.sim import InstanceSpec, NoiseSpec, RunSpec, StageLink
from headway.sim.metrics import SloTargets
from headway.sim.workload import TraceRequest


def requests(rng: random.Random, count: int) -> list[TraceRequest]:
    at, drawn = 0.0, []
    for _ in range(count):
        at += rng.expovariate(1 / rng.choice((0.002, 0.05, 0.3)))
        drawn.append(TraceRequest(at, rng.randint(1, 500), rng.randint(1, 60), klass=rng.choice(("a", "b"))))
    return drawn


def instance(rng: random.Random) -> InstanceSpec:
    config = SchedulerConfig(
        policy=rng.choice(("fcfs", "lars", "srpt", "ladder", "ladder")),
        chunking=rng.choice(("static:96", "adaptive", "whole")),
        stages=rng.choice((1, 1, 2, 3)),
        pipeline_schedule=rng.choice(("stream", "microbatch")),
        max_num_seqs=rng.choice((3, 64)),
    )
    link = StageLink(rng.choice((0.0, 1e-4)), 1e-6)
    pool = rng.choice((640, 1200, 6000))
    return InstanceSpec(config=config, latency=small_machine(), kv_tokens=pool, block_tokens=16, link=link)


def how(rng: random.Random, seed: int, fast_forward: bool) -> RunSpec:
    return RunSpec(
        replicas=rng.choice((1, 1, 3)),
        seed=seed,
        targets={"a": SloTargets(ttft_s=0.5, tbt_s=0.05)},
        noise=rng.choice((NoiseSpec(), NoiseSpec("lognormal", 0.2), NoiseSpec("uniform", 0.5, 1.2))),
        window_s=rng.choice((None, None, 1.0)),
        timeout_s=rng.choice((None, 0.7)),
        patience_s=rng.choice((None, 0.5)),
        fast_forward=fast_forward,
    )
