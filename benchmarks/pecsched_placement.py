"""What a placement costs PecSched: `python -m benchmarks.pecsched_placement`. CPU time of the policy's calls alone.

Single-GPU replicas, eight a node; Poisson arrivals of chats (Azure's prompt lengths) at `--short-load` of what the
replicas compute, and of long requests of 100K to 500K at `--long-load`, with as many replicas each as `--long-replicas`
says; half of the replicas have one at the start. `literal` looks at every replica for every decision, as the paper's
scheduler does; same decisions.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time

import numpy as np

from headway.core.request import Request
from headway.perf.hardware.links import link
from headway.perf.hardware.models import model
from headway.perf.latency.groups import GroupShape
from headway.policy.placement.pecsched.policy import PecSched, PecSchedOptions
from headway.policy.placement.registry import PolicyContext
from headway.policy.placement.view import ClusterInstance, ClusterLinks, ClusterState
from headway.serving.load.machine import machine
from headway.sim.workload.presets import AZURE_CONV_IN
from headway_research.pecsched.drill import DrillResult, PlacementDrill

SIZES = (32, 128, 512, 2048, 8192)


class Quick:
    """Seconds of a 7B model on an A100, roughly, at next to no cost: 0.1 s for 1K tokens, quadratic beyond."""

    source = "rough"

    def prefill_s(self, past: int, tokens: int, group: GroupShape) -> float:
        work = tokens * 9e-5 + 5e-10 * tokens * tokens
        return work / group.sp if group.strategy.attn == "ulysses" else 1.2 * work / group.sp

    def solve_tokens(self, past: int, budget_s: float, group: GroupShape) -> int:
        raise NotImplementedError


def requests(count: int, replicas: int, short_load: float, long_load: float, size: int) -> list[Request]:
    """`count` short requests, and long ones at their own load, by arrival."""
    rng, lengths = random.Random(0), Quick()
    prompts = np.minimum(AZURE_CONV_IN.sample(np.random.default_rng(0), count), 8192).tolist()
    mean_s = statistics.fmean(lengths.prefill_s(0, tokens, GroupShape(1)) for tokens in prompts)
    short_gap_s = mean_s / (short_load * replicas)
    long_gap_s = lengths.prefill_s(0, 300_000, GroupShape(1)) / (long_load * replicas)
    made, at = [], 0.0
    for i, tokens in enumerate(prompts):
        at += rng.expovariate(1 / short_gap_s)
        made.append(Request(id=f"s{i}", arrival_s=at, prompt_tokens=tokens, max_output_tokens=100))
    at, end, i = 0.0, made[-1].arrival_s, 0
    for _ in range(max(1, replicas // 2 // size)):
        tokens = rng.randint(100_000, 500_000)
        made.append(Request(id=f"h{len(made)}", arrival_s=0.0, prompt_tokens=tokens, max_output_tokens=100))
    while (at := at + rng.expovariate(1 / long_gap_s)) < end:
        tokens = rng.randint(100_000, 500_000)
        made.append(Request(id=f"l{i}", arrival_s=at, prompt_tokens=tokens, max_output_tokens=100))
        i += 1
    return sorted(made, key=lambda request: request.arrival_s)


def drill(replicas: int, count: int, args: argparse.Namespace, literal: bool) -> DrillResult:
    network = link("ib-400")
    prefills = [ClusterInstance(id=i, node=i // 8, role="prefill") for i in range(replicas)]
    decodes = [
        ClusterInstance(id=replicas + i, node=replicas // 8 + i // 8, role="decode")
        for i in range(max(4, replicas // 8))
    ]
    book = ClusterState([*prefills, *decodes], ClusterLinks(inside=link("nvlink3"), across=network))
    options = PecSchedOptions(long_replicas="fixed", long_sp=args.long_replicas)
    policy = PecSched(PolicyContext(latency=Quick(), shape=model("mistral-7b")), options, literal=literal)
    work = requests(count, replicas, args.short_load, args.long_load, args.long_replicas)
    run = PlacementDrill(policy, book, Quick(), stopwatch=time.process_time if args.cpu_clock else time.perf_counter)
    gc.collect()
    gc.disable()
    out = run.run(work, work[-1].arrival_s)
    gc.enable()
    return out


def summary(out: DrillResult, count: int) -> dict[str, float]:
    """Of the second half, when the cluster has filled. Microseconds."""
    short, long = out.short_s[len(out.short_s) // 2 :], out.long_s[len(out.long_s) // 2 :]
    return {
        "short_us": statistics.fmean(short) * 1e6,
        "short_p50_us": statistics.median(short) * 1e6,
        "short_p99_us": float(np.quantile(short, 0.99)) * 1e6,
        "short_per_s": 1 / statistics.fmean(short),
        "long_us": statistics.fmean(long) * 1e6,
        "long_p50_us": statistics.median(long) * 1e6,
        "long_p99_us": float(np.quantile(long, 0.99)) * 1e6,
        "longs": len(long),
        "all_events_us": out.all_s / count * 1e6,
        "suspensions": out.suspensions,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    parser.add_argument(
        "--requests", type=int, default=0, help="short requests a run; 0: 12 a replica, at least 20,000"
    )
    parser.add_argument("--short-load", type=float, default=0.6)
    parser.add_argument("--long-load", type=float, default=0.3)
    parser.add_argument("--long-replicas", type=int, default=22)
    parser.add_argument("--literal", action="store_true", help="measure the scan over all replicas as well")
    parser.add_argument("--cpu-clock", action="store_true", help="CPU time in place of wall time")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = []
    for replicas in map(int, args.sizes.split(",")):
        for literal in (False, True) if args.literal else (False,):
            count = args.requests or max(20_000, 12 * replicas)
            count = min(count, 4000) if literal else count
            rows.append(
                {"replicas": replicas, "literal": literal, **summary(drill(replicas, count, args, literal), count)}
            )
            if not args.json:
                row = rows[-1]
                print(
                    f"{replicas:5d} replicas{' literal' if literal else '':8s}: short {row['short_us']:.1f} µs "
                    f"(p50 {row['short_p50_us']:.1f}, p99 {row['short_p99_us']:.1f}; "
                    f"{row['short_per_s']:,.0f}/s), all events of a request "
                    f"{row['all_events_us']:.1f} µs; long {row['long_us']:.1f} µs "
                    f"(p50 {row['long_p50_us']:.1f}, p99 {row['long_p99_us']:.1f}, "
                    f"{row['longs']} of them); {row['suspensions']} suspensions"
                )
    if args.json:
        print(json.dumps({"schema": "headway.benchmark.pecsched-placement/1", "machine": machine(), "rows": rows}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
