"""What share of the machine's matrix product rate prefill attention reaches, compiled and by ATen.

Run: python benchmarks/attention_efficiency.py [--threads 2 1] [--rows 16 128] [--past 0 32768] [--q-heads 8]
[--kv-heads 2] [--dim 64] [--block 1024] [--json FILE]. A chunk of `rows` tokens over `past` in a pool of one layer,
bf16, by the whole backend: store the chunk, attend over history and chunk. ATen is the same backend without compiled
kernels; calls of both alternate, so that noise hits both. FLOPs are those of the visible scores,
4 * q_heads * dim * (rows * past + rows * (rows + 1) / 2). The limit is a bf16 matrix product of 2,048 x 512 x 3,072 by
oneDNN with packed weights. Prints GFLOP/s, medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from headway.runtime.attention.backend import BatchSegment
from headway.runtime.attention.backends import CpuBackend
from headway.runtime.attention.kv_pool import KvPool


def alternate(calls: list[Callable[[], object]], repeats: int) -> list[float]:
    """Median seconds of each call, taken in turns after one unmeasured call of each."""
    times: list[list[float]] = [[] for _ in calls]
    for turn in range(repeats + 1):
        for kept, call in zip(times, calls, strict=True):
            start = time.perf_counter()
            call()
            if turn:
                kept.append(time.perf_counter() - start)
    return [statistics.median(kept) for kept in times]


def product_rate() -> float:
    """FLOP/s of the matrix product that is the limit."""
    rows, inputs, outputs = 2048, 512, 3072
    x, weight = (
        torch.randn(rows, inputs).bfloat16(),
        torch.ops.mkldnn._reorder_linear_weight(torch.randn(outputs, inputs).bfloat16(), rows),
    )
    seconds = alternate([lambda: torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")], 15)[0]
    return 2 * rows * inputs * outputs / seconds


def rates(rows: int, past: int, heads: tuple[int, int], dim: int, block: int | None) -> tuple[float, float]:
    """FLOP/s of the compiled kernel and of ATen; `block` scatters the history in blocks of so many tokens."""
    slots = past + rows if block is None else -(-(past + rows) // block) * block
    pool = KvPool(1, heads[1], slots, dim, torch.bfloat16)
    pool.data.normal_()
    q, k, v = (torch.randn(rows, count, dim).bfloat16() for count in (heads[0], heads[1], heads[1]))
    runs: tuple[tuple[int, int], ...] = ((0, slots),)
    if block is not None:
        runs = tuple((index * block, block) for index in torch.randperm(slots // block).tolist())
    flops = 4 * heads[0] * dim * (rows * past + rows * (rows + 1) / 2)

    def whole(backend: CpuBackend) -> object:
        plan = backend.plan([BatchSegment(0, rows, past, runs)], pool)
        return backend.run(0, q, k, v, plan)

    backends = CpuBackend(True), CpuBackend(False)
    repeats = int(max(3, min(25, 5e9 / flops)))
    compiled, aten = alternate([partial(whole, backend) for backend in backends], repeats)
    return flops / compiled, flops / aten


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="*", default=[2, 1])
    parser.add_argument("--rows", type=int, nargs="*", default=[16, 32, 64, 128, 256, 512])
    parser.add_argument("--past", type=int, nargs="*", default=[0, 4096, 16384, 32768])
    parser.add_argument("--q-heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--block", type=int, help="scatter the history in blocks of this many tokens")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    heads = options.q_heads, options.kv_heads
    found = []
    for threads in options.threads:
        torch.set_num_threads(threads)
        limit = product_rate()
        print(f"{threads} threads: matrix product {limit / 1e9:.0f} GFLOP/s; compiled / ATen / share of the product")
        print("rows " + "".join(f"{f'past {past}':>20}" for past in options.past))
        for rows in options.rows:
            cells = []
            for past in options.past:
                compiled, aten = rates(rows, past, heads, options.dim, options.block)
                cells.append(f"{compiled / 1e9:>8.0f} /{aten / 1e9:4.0f} /{compiled / limit:4.0%}")
                found.append(
                    {"threads": threads, "rows": rows, "past": past, "compiled_flops": compiled, "aten_flops": aten,
                     "product_flops": limit}
                )  # fmt: skip
            print(f"{rows:<5}" + "".join(cells), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"schema": "headway.attention_efficiency/1", "cells": found}, indent=1))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
