"""Decode attention over one long context in one process and over KV groups, a process with one thread each.

    python -m benchmarks.kv_parallel [--tokens 65536] [--groups 2] [--layers 4] [--dtype bfloat16] [--json FILE]

One request's next token, through `layers` layers of attention with the shape of Llama-3-8B. K1: one process holds the
whole context, the others wait. Local: each of K processes attends over its share, all at the same time; what counts is
the slowest. Merged: the live exchange of a KV group over gloo, layer by layer: the query goes out, partial answers come
back and are merged; as its owner sees it. The three take turns, so that noise hits all. Prints medians and their ratios
to K1, and the fastest turns, which on a machine with other work are nearer to what an idle one does.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Callable
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from headway.perf.latency.layout import ParallelLayout
from headway.runtime.attention.base import BatchSegment
from headway.runtime.attention.cpu import CpuBackend
from headway.runtime.attention.kv_pool import KvPool
from headway.runtime.attention.native import kernels
from headway.runtime.attention.partial import PartialAttention, PartialRead
from headway.runtime.executor.gloo_links import GlooLinks, choose_interface, join, rendezvous
from headway.runtime.executor.group_attention import GroupAttention, RemoteQuery, RemoteRows
from headway.runtime.executor.rank_layout import place_of

HOST = "127.0.0.1"


def work(rank: int, ports: Queue[int], results: Queue[list[list[float]]], args: argparse.Namespace) -> None:
    """One process: group `rank`. The last group owns the request's row, and has the whole context for K1 as well."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    choose_interface(HOST)
    if rank == 0:
        store = rendezvous(HOST, None, 60.0)
        for _ in range(args.groups - 1):
            ports.put(store.port)
    else:
        store = rendezvous(HOST, ports.get(), 60.0)
    join(rank, args.groups, store, 60.0)
    with torch.inference_mode():
        times = measure(rank, args)
    if rank == args.groups - 1:
        results.put([[statistics.median(column), min(column)] for column in zip(*times, strict=True)])
    dist.barrier()
    os._exit(0)


def measure(rank: int, args: argparse.Namespace) -> list[tuple[float, float, float]]:
    """Seconds of (K1, local, merged) for each turn but the first."""
    groups, owner = args.groups, args.groups - 1
    dtype = getattr(torch, args.dtype)
    share = args.tokens // groups
    slots = args.tokens + 1 if rank == owner else share
    pool = KvPool(args.layers, args.kv_heads, slots, args.dim, dtype)
    for plane in pool.data.flatten(0, 1):
        plane.normal_()
    heads = args.q_heads + 2 * args.kv_heads
    rows = torch.randn(1, heads, args.dim).to(dtype)
    q, k, v = torch.split_with_sizes(rows, (args.q_heads, args.kv_heads, args.kv_heads), 1)
    links = GlooLinks(place_of(ParallelLayout(kvp=groups), rank), 1, dtype)
    shared = GroupAttention(CpuBackend(), links, args.q_heads)
    whole = BatchSegment(0, 1, args.tokens, ((0, slots),))
    own = BatchSegment(0, 1, args.tokens - share * owner, ((share * owner, slots - share * owner),))
    reading = PartialRead(0, 1, own.slot_ranges if rank == owner else ((0, share),), rank == owner)

    def one() -> None:
        if rank == owner:
            plan = shared.plan([whole], pool)
            for layer in range(args.layers):
                shared.run(layer, q, k, v, plan)

    def local() -> None:
        partials = PartialAttention([reading], pool, kernels())
        for layer in range(args.layers):
            partials.run(layer, q)

    def merged() -> None:
        if rank == owner:
            plan = shared.share([own], pool, [RemoteQuery(group, (own,)) for group in range(owner)], ())
            for layer in range(args.layers):
                shared.run(layer, q, k, v, plan)
        else:
            plan = shared.share((), pool, (), [RemoteRows(owner, 1, [(0, share)])])
            for layer in range(args.layers):
                shared.attend_in_place(layer, plan)

    turns = [(clock(one), clock(local, slowest=True), clock(merged)) for _ in range(args.repeats + 1)]
    return turns[1:]


def clock(call: Callable[[], None], slowest: bool = False) -> float:
    """Seconds from a common start, of this process or of the slowest."""
    dist.barrier()
    start = time.perf_counter()
    call()
    seconds = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    if slowest:
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """One process a group; the owner's medians."""
    context = multiprocessing.get_context("spawn")
    ports: Any = context.Queue()
    results: Any = context.Queue()
    processes = [context.Process(target=work, args=(rank, ports, results, args)) for rank in range(args.groups)]
    for process in processes:
        process.start()
    one, local, merged = results.get(timeout=600)  # each (median, fastest)
    for process in processes:
        process.join()
    return {
        "schema": "headway.benchmark.kv-parallel.v1",
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        "shape": vars(args) | {"json": None},
        "median": _ratios(one[0], local[0], merged[0]),
        "fastest": _ratios(one[1], local[1], merged[1]),
    }


def _ratios(one_s: float, local_s: float, merged_s: float) -> dict[str, float]:
    ratios = {"local_ratio": local_s / one_s, "merged_ratio": merged_s / one_s}
    return {"k1_s": one_s, "local_s": local_s, "merged_s": merged_s, **ratios}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--q-heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    told = run(args)
    kv = 2 * args.layers * args.kv_heads * args.dim * args.tokens * (2 if args.dtype == "bfloat16" else 4)
    name = f"K{args.groups}"
    print(f"{args.tokens} tokens, {args.layers} layers, {args.dtype}, {kv / 2**20:.0f} MiB of keys and values")
    for word in ("median", "fastest"):
        row = told[word]
        print(f"{word}: K1 {row['k1_s'] * 1e3:.2f} ms ({kv / row['k1_s'] / 1e9:.1f} GB/s)", end="")
        print(f", {name} local {row['local_s'] * 1e3:.2f} ms, {row['local_ratio']:.2f} of K1", end="")
        print(f", merged {row['merged_s'] * 1e3:.2f} ms, {row['merged_ratio']:.2f} of K1")
    if args.json:
        args.json.write_text(json.dumps(told, indent=1, default=str) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
