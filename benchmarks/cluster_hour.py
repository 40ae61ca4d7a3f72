"""CPU seconds to simulate an hour of the Azure 2023 trace with PecSched's rewriting of its longest prompts, on 32 A100.

    python -m benchmarks.cluster_hour --traces AzureLLMInferenceTrace_code.csv.gz AzureLLMInferenceTrace_conv.csv.gz

At most 60 a policy are asked. One run each: the same file, seed and policy do the same work.
"""

from __future__ import annotations

import argparse
import time

from headway.serving.load.machine import machine
from headway.sim.cluster.build import run_cluster
from headway.sim.scenario import parse_scenario
from headway_research.pecsched.setting import MODELS, SYSTEMS, measure, scenario

POLICIES = ("FIFO", "Reservation", "Priority", "PecSched")


def main() -> int:
    parser = argparse.ArgumentParser(description="CPU seconds of a simulated hour.")
    parser.add_argument("--traces", nargs="+", required=True, help="Azure CSV files")
    parser.add_argument("--model", default=next(iter(MODELS)), choices=list(MODELS))
    parser.add_argument("--policies", nargs="*", default=list(POLICIES), choices=list(SYSTEMS))
    a = parser.parse_args()
    print(machine())
    for name in a.policies:
        data = scenario(a.model, name, "default", "trace", 3600.0)
        data["workload"] = {"trace": a.traces, "long_rule": "p95-uniform"}
        parsed = parse_scenario(data)
        began = time.process_time()
        result = run_cluster(parsed, 0)
        seconds = time.process_time() - began
        found = measure(result)
        print(
            f"{a.model}, {name:12} {seconds:5.1f} CPU s for {len(result.sim.records)} requests "
            f"({found.longs} long, {found.starved:.0%} of them starved)",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
