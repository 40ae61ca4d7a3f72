"""Small simulations from a seed: an instance, a workload and a way to run it."""

from __future__ import annotations

import random

from tests.helpers.unit_latency import small_machine

from headway.perf.latency.groups import ShardExchangeCost
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
    groups = rng.choice((1, 1, 1, 2, 3))
    config = SchedulerConfig(
        policy=rng.choice(("fcfs", "lars", "srpt", "ladder", "ladder")),
        chunking=rng.choice(("static:96", "adaptive", *(("whole",) if groups == 1 else ()))),
        stages=rng.choice((1, 1, 2, 3)),
        pipeline_schedule=rng.choice(("stream", "microbatch")),
        max_num_seqs=rng.choice((3, 64)),
        kv_parallel=groups,
        kv_shard_tokens=rng.choice((160, 320, 640)) if groups > 1 else None,
    )
    return InstanceSpec(
        config=config,
        latency=small_machine(),
        kv_tokens=rng.choice((640, 1200, 6000)),
        block_tokens=16,
        link=StageLink(rng.choice((0.0, 1e-4)), 1e-6),
        exchange=rng.choice((ShardExchangeCost(), ShardExchangeCost(1e-4, 1e-6))),
    )


def how(rng: random.Random, seed: int, fast_forward: bool) -> RunSpec:
    return RunSpec(
        replicas=rng.choice((1, 1, 3)),
        seed=seed,
        targets={"a": SloTargets(ttft_s=0.5, tbt_s=0.05)},
        noise=rng.choice(
            (NoiseSpec(), NoiseSpec(kind="lognormal", amount=0.2), NoiseSpec(kind="uniform", amount=0.5, bias=1.2))
        ),
        window_s=rng.choice((None, None, 1.0)),
        timeout_s=rng.choice((None, 0.7)),
        patience_s=rng.choice((None, 0.5)),
        fast_forward=fast_forward,
    )
