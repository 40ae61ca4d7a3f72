"""Simulation in virtual time: the live engine's scheduler and block manager, driven by predicted iteration times.

    from headway.sim import InstanceSpec, RunSpec, simulate
    result = simulate(InstanceSpec(config=SchedulerConfig(), latency=model, kv_tokens=400_000), requests)
    result.summary().total.latencies["ttft_s"]["p50"]

Deterministic: the same arguments give the same result, bit by bit, on any computer with the same numpy.
The names are imported lazily: a server uses a part of this package only, and starts sooner.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headway.sim.loop import simulate
    from headway.sim.result import IterationRecord, ReplicaUse, SimResult
    from headway.sim.spec import InstanceSpec, NoiseSpec, RunSpec, StageLink

_MODULES = {
    "InstanceSpec": "spec",
    "IterationRecord": "result",
    "NoiseSpec": "spec",
    "ReplicaUse": "result",
    "RunSpec": "spec",
    "SimResult": "result",
    "StageLink": "spec",
    "simulate": "loop",
}

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


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'headway.sim' has no attribute {name!r}")
    value = getattr(import_module(f"headway.sim.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
