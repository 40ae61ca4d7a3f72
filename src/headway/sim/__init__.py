"""Simulation in virtual time: the live engine's scheduler and block manager, driven by predicted iteration times.

    from headway.sim import InstanceSpec, RunSpec, simulate
    result = simulate(InstanceSpec(config=SchedulerConfig(), latency=model, kv_tokens=400_000), requests)
    result.summary().total.latencies["ttft_s"]["p50"]

Deterministic: the same arguments give the same result, bit by bit, on any computer with the same numpy.
"""

from headway.sim.noise import NoiseSpec
from headway.sim.pipeline import StageLink
from headway.sim.result import IterationRecord, ReplicaUse, SimResult
from headway.sim.simulation import simulate
from headway.sim.spec import InstanceSpec, RunSpec

__all__ = [
    "InstanceSpec",
    "IterationRecord",
    "NoiseSpec",
    "ReplicaUse",
    "RunSpec",
    "SimResult",
    "StageLink",
    "simulate",
]
