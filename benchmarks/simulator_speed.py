"""How fast the simulator is: `python -m benchmarks.simulator_speed --trace AzureLLMInferenceTrace_conv.csv.gz`.

Requests and iterations per CPU-second, medians of several runs: one Llama-3-8B replica on an A100-80GB (fitted
latencies), FCFS with static:512 chunks, lengths of a trace (without one: of the preset azure-conv-like), arrivals at 2
and 0.2 times what it can serve, with and without fast-forward. Peak memory is the whole
process's, the summary included.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time

import numpy as np

from headway.cli.doctor import is_compiled
from headway.perf.latency.fitted import fitted
from headway.policy.iteration.config import SchedulerConfig
from headway.serving.load.prompts import machine
from headway.sim import InstanceSpec, RunSpec, simulate
from headway.sim.workload import TraceRequest
from headway.sim.workload.generate import PoissonArrivals, preset
from headway.sim.workload.traces import read_trace
from headway.sim.workload.transforms import with_arrivals

CAPACITY_RPS = 8.0
"""About what the replica serves; only the ratio of load to it matters here."""


def lengths(trace: str | None, count: int) -> list[TraceRequest]:
    if trace is not None:
        return list(read_trace(trace).requests[:count])
    return preset("azure-conv-like").draw(np.random.default_rng(0), PoissonArrivals(1.0), count)


def measure(spec: InstanceSpec, requests: list[TraceRequest], fast_forward: bool, rounds: int) -> dict[str, float]:
    rates, steps = [], []
    for _ in range(rounds):
        started = time.process_time()
        result = simulate(spec, requests, RunSpec(fast_forward=fast_forward))
        elapsed = time.process_time() - started
        rates.append(len(requests) / elapsed)
        steps.append(sum(use.iterations for use in result.replicas) / elapsed)
    started = time.process_time()
    result.summary()
    return {
        "requests_per_cpu_s": round(statistics.median(rates)),
        "iterations_per_cpu_s": round(statistics.median(steps)),
        "idle_share": round(result.idle_share, 3),
        "served_rps": round(len(requests) / result.duration_s, 2),
        "summary_s": round(time.process_time() - started, 2),
        "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", help="a trace file for the lengths")
    parser.add_argument("--requests", type=int, default=19_366)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    requests = lengths(arguments.trace, arguments.requests)
    config = SchedulerConfig(policy="fcfs", chunking="static:512")
    spec = InstanceSpec(config=config, latency=fitted("a100-80gb", "llama-3-8b"), kv_tokens=400_000, block_tokens=16)
    rows = {}
    for name, load in (("saturated", 2.0), ("low load", 0.2)):
        timed = with_arrivals(requests, PoissonArrivals(CAPACITY_RPS * load), np.random.default_rng(1))
        for fast_forward in (False, True):
            label = f"{name}, {'with' if fast_forward else 'without'} fast-forward"
            rows[label] = measure(spec, timed, fast_forward, arguments.rounds)
    if arguments.json:
        print(json.dumps({"machine": machine(), "requests": len(requests), "rows": rows}, indent=1))
        return
    print(
        f"{machine()}, {'compiled' if is_compiled() else 'interpreted'}\n"
        f"{len(requests)} requests; medians of {arguments.rounds}"
    )
    for label, row in rows.items():
        print(f"{label:<34} " + "  ".join(f"{name} {value:,}" for name, value in row.items()))


if __name__ == "__main__":
    main()
