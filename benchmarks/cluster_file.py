"""A cluster file, simulated as it stands and served: the same requests, and simulated times over measured ones.

    python -m benchmarks.cluster_file [--runs 3] [--rate 3]

Two instances of the embedded model, one thread each, join-shortest-queue; every tenth prompt is a document. A run
loads an instance and simulates, then starts the cluster and sends it the requests with `headway bench`. A machine on
which other programs run is slower for one of the two: the spread over the runs says by how much.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from headway.serving.load.machine import machine
from headway.serving.load.server_process import ServerProcess

COMMAND = (sys.executable, "-m", "headway.cli.main")
METRICS = ("ttft_s", "tbt_s", "e2e_s")
FILE = """placement: jsq
pools: [{count: 2}]
serve: {max_model_len: 16k, kv_cache_memory: 128M, threads: 1}
workload: {trace: requests.jsonl}
"""
SHORT, DOCUMENT, OUTPUT = 3000, 15000, 32
"""Tokens of prompts and outputs."""


def write_requests(path: Path, count: int, rate: float) -> None:
    """Write Poisson arrivals at `rate` a second, seeded."""
    arrivals = np.cumsum(np.random.default_rng(0).exponential(1 / rate, count))
    rows = (
        {
            "arrival_s": round(float(at), 3),
            "prompt_tokens": DOCUMENT if i % 10 == 9 else SHORT,
            "output_tokens": OUTPUT,
            "class": "document" if i % 10 == 9 else "short",
        }
        for i, at in enumerate(arrivals)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def simulated(file: Path) -> dict[str, Any]:
    """Return the simulation's result of each class."""
    command = (*COMMAND, "simulate", str(file), "--json", "-")
    data = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    return {block["class"]: block for block in data["points"][0]["runs"][0]["classes"]}


def served(file: Path, trace: Path, out: Path) -> dict[str, Any]:
    """Return what the clients of the live cluster measured, by class."""
    with ServerProcess([str(file)], command=(*COMMAND, "cluster")) as server:
        command = (*COMMAND, "bench", "--url", server.url, "--trace", str(trace), "--json", str(out))
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return {block["class"]: block for block in json.loads(out.read_text())["summary"]["classes"]}


def main() -> int:
    parser = argparse.ArgumentParser(description="Simulated and measured times of one cluster file, as ratios.")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--rate", type=float, default=3.0, help="requests a second")
    a = parser.parse_args()
    print(f"{machine()}; load {os.getloadavg()[0]:.1f} before")
    ratios: dict[tuple[str, str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        file, trace = Path(folder) / "cluster.yaml", Path(folder) / "requests.jsonl"
        file.write_text(FILE)
        write_requests(trace, a.requests, a.rate)
        for number in range(a.runs):
            ours, live = simulated(file), served(file, trace, Path(folder) / "live.json")
            for klass, metric, percentile in (
                (klass, metric, percentile) for klass in ours for metric in METRICS for percentile in ("p50", "p90")
            ):
                both = ours[klass][metric][percentile], live[klass][metric][percentile]
                ratios.setdefault((klass, metric, percentile), []).append(both[0] / both[1])
                print(f"run {number}: {klass:<8} {metric:<6} {percentile} simulated {both[0] * 1e3:8.1f} ms, "
                      f"measured {both[1] * 1e3:8.1f} ms")  # fmt: skip
    print("simulated over measured, each run:")
    for (klass, metric, percentile), each in ratios.items():
        print(f"  {klass:<8} {metric:<6} {percentile}  {'  '.join(f'{ratio:.2f}' for ratio in each)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
