"""Virtual time: the live engine's own scheduler and ledger, driven by predicted times instead of a machine.

    from headway.simulator import InstanceSpec, RunSpec, simulate
    result = simulate(InstanceSpec(config=SchedulerConfig(), latency=model, kv_tokens=400_000), requests)
    result.summary().total.latencies["ttft_s"]["p50"]

Deterministic: the same arguments give the same result, bit by bit, on any machine with the same numpy.
"""

from headway.simulator.noise import Noise
from headway.simulator.pipeline import Link
from headway.simulator.result import Iteration, ReplicaUse, SimResult
from headway.simulator.run import simulate
from headway.simulator.spec import InstanceSpec, RunSpec

__all__ = ["InstanceSpec", "Iteration", "Link", "Noise", "ReplicaUse", "RunSpec", "SimResult", "simulate"]
