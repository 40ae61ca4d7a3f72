"""Chats behind long documents, live: how long each kind waits for its first token under FIFO, PecSched, and the ladder.

    python -m benchmarks.cluster_convoy --timed [--policies pecsched] [--json out.json]

`--timed`: 16 instances whose iterations, runs and transfers take what is predicted (Llama-3-70B on four A100 each: 12
prefill, 4 decode), each a process behind the real router and messages; the simulator's percentiles for the same
arrivals are beside. A policy takes about a minute. Give each a quiet host: what a busy one delays is in the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import yaml
from tests.helpers.timed_cluster import scenario_of, spec_of, timed_cluster

from headway.core.files import ScratchFolder
from headway.core.request import SamplingParams
from headway.runtime.engine.protocol import SubmitRequest
from headway.serving.load.prompts import machine
from headway.sim.build import requests_of
from headway.sim.cluster.build import placement_of
from headway.sim.cluster.simulation import simulate_cluster
from headway.sim.workload import TraceRequest

FCFS = {"policy": "fcfs", "chunking": "static:4096", "max_num_batched_tokens": 4096}
LARS = {"policy": "lars", "chunking": "adaptive", "t_target_s": 0.25}
POLICIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fifo": ({"long_sp": 4}, FCFS),
    "pecsched": ({"long_sp": 4, "long_replicas": "fixed"}, FCFS),
    "ladder": ({}, LARS),
}
POINTS = (50, 90, 99)
Waits = dict[str, list[float]]
"""Seconds from the call to the first token, by class."""


def scenario(policy: str, seconds: float) -> dict[str, Any]:
    options, scheduler = POLICIES[policy]
    pool = {"tp": 4, "per_node": 2, "kv_tokens": 400_000}
    return {
        "cluster": {
            "accelerator": "a100-80gb",
            "placement": policy,
            "options": options,
            "pools": [{"role": "prefill", "count": 12, **pool}, {"role": "decode", "count": 4, **pool}],
        },
        "model": "llama-3-70b",
        "latency": {"source": "roofline"},
        "policy": scheduler,
        "workload": {
            "qps": 12.0,
            "mix": [
                {
                    "class": "chat",
                    "share": 0.985,
                    "prompt": "lognormal:median=600,p90=2000,max=4K",
                    "output": "constant:8",
                },
                {"class": "document", "share": 0.015, "prompt": "uniform:40K-120K", "output": "constant:4"},
            ],
        },
        "run": {"window_s": seconds, "seeds": [1]},
    }


async def live(file: Path, requests: Sequence[TraceRequest]) -> Waits:
    """Send these to timed instances at their times."""
    folder = ScratchFolder("headway-convoy-")
    client = timed_cluster(file, folder.path)
    waits: Waits = {}

    async def one(number: int, request: TraceRequest, began_s: float) -> None:
        prompt = np.ones(request.prompt_tokens, np.int32).tobytes()
        await asyncio.sleep(began_s + request.arrival_s - time.monotonic())
        # A sleep ends late: that is not the cluster's.
        at_s = time.monotonic()
        params = SamplingParams(max_tokens=request.output_tokens, ignore_eos=True)
        submit = SubmitRequest(id=f"r{number}", received_s=at_s, prompt_tokens=request.prompt_tokens, params=params)
        first_s = None
        async for delta in client.generate(submit, prompt):
            if delta.error is not None:
                raise RuntimeError(f"{submit.id}: {delta.error}")
            if first_s is None and delta.tokens:
                first_s = time.monotonic()
                waits.setdefault(request.klass, []).append(first_s - at_s)

    try:
        await client.start()
        began_s = time.monotonic() + 0.5
        await asyncio.gather(*(one(number, request, began_s) for number, request in enumerate(requests)))
    finally:
        await client.close()
        folder.close()
    return waits


def simulated(file: Path, requests: Sequence[TraceRequest]) -> Waits:
    """The same in virtual time."""
    parsed = scenario_of(file)
    spec = spec_of(parsed)
    waits: Waits = {}
    for record in simulate_cluster(spec, placement_of(parsed, spec), requests).sim.records:
        waits.setdefault(record.klass, []).append(record.token_s[0] - record.arrival_s)
    return waits


def run(policy: str, seconds: float) -> dict[str, Any]:
    """One policy, both ways, by class and percentile."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "convoy.yaml"
        file.write_text(yaml.safe_dump(scenario(policy, seconds)))
        parsed = scenario_of(file)
        requests = sorted(requests_of(parsed.workload, seconds, 1), key=lambda request: request.arrival_s)
        found = {"timed": asyncio.run(live(file, requests)), "simulated": simulated(file, requests)}
    row: dict[str, Any] = {"policy": policy, "requests": len(requests)}
    for klass in sorted(found["simulated"]):
        for way, waits in found.items():
            points = np.percentile(waits[klass], POINTS).tolist()
            row[f"{klass} {way}"] = dict(zip((f"p{point}" for point in POINTS), points, strict=True))
    return row


def show(row: dict[str, Any]) -> None:
    for klass in ("chat", "document"):
        timed, virtual = row[f"{klass} timed"], row[f"{klass} simulated"]
        cells = [
            f"{name} {timed[name]:7.3f} / {virtual[name]:7.3f} ({timed[name] / virtual[name] - 1:+.1%})"
            for name in timed
        ]
        print(f"{row['policy']:9} {klass:9} {'   '.join(cells)}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Waits for the first token: live over timed instances / simulated.")
    parser.add_argument("--timed", action="store_true", required=True, help="instances sleep for what is predicted")
    parser.add_argument("--policies", nargs="*", default=list(POLICIES), choices=list(POLICIES))
    parser.add_argument("--seconds", type=float, default=40.0, help="of arrivals")
    parser.add_argument("--json", type=Path, help="write the figures")
    a = parser.parse_args()
    print(machine())
    print("TTFT in seconds, timed / simulated")
    rows = []
    for policy in a.policies:
        rows.append(run(policy, a.seconds))
        show(rows[-1])
    if a.json is not None:
        report = {"schema": "headway.cluster_convoy/1", "machine": str(machine()), "seconds": a.seconds, "rows": rows}
        a.json.write_bytes(msgspec.json.encode(report))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
