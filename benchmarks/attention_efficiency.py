"""What share of the attention primitive's own speed a prefill chunk over history reaches inside the backend.

Run: python benchmarks/attention_efficiency.py [--dtype float32] [--past 8192 32768] [--chunks 128 512 2048]. The
primitive alone is one unmasked call of the same rows over the same number of visible keys (history plus half of the
chunk, which is what a causal chunk costs), contiguous. The backend stores the chunk, attends over history and chunk,
and merges. Prints median milliseconds of both (calls alternate, so that noise hits both) and their ratio.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from headway.attention.base import Segment, make_backend
from headway.attention.kv_pool import KvPool
from headway.attention.primitive import attend

Q_HEADS, KV_HEADS, DIM = 8, 2, 64


def alternate(
    first: Callable[[], object], second: Callable[[], object], repeats: int
) -> tuple[list[float], list[float]]:
    """Seconds of each call, taken in turns after one unmeasured call of both."""
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(repeats + 1):
        for kept, call in zip(times, (first, second), strict=True):
            start = time.perf_counter()
            call()
            if turn:
                kept.append(time.perf_counter() - start)
    return times


def measure(past: int, chunk: int, dtype: torch.dtype, repeats: int, block: int | None) -> tuple[float, float, float]:
    """Median seconds of the primitive and of the backend, and the median of their ratios turn by turn."""
    slots = past + chunk
    pool = KvPool(1, KV_HEADS, slots, DIM, dtype)
    pool.data.normal_()
    q, k, v = (torch.randn(chunk, heads, DIM).to(dtype) for heads in (Q_HEADS, KV_HEADS, KV_HEADS))
    folded = q.transpose(0, 1).reshape(KV_HEADS, -1, DIM)
    seen = past + chunk // 2
    keys, values = (torch.randn(KV_HEADS, seen, DIM).to(dtype) for _ in range(2))
    runs: tuple[tuple[int, int], ...] = ((0, slots),)
    if block is not None:
        order = torch.randperm(slots // block).tolist()
        runs = tuple((index * block, block) for index in order)
    backend = make_backend("cpu")

    def whole() -> Tensor:
        plan = backend.plan([Segment(0, chunk, past, runs)], pool)
        return backend.run(0, q, k, v, plan)

    alone, inside = alternate(lambda: attend(folded, keys, values, False), whole, repeats)
    ratio = statistics.median(a / b for a, b in zip(alone, inside, strict=True))
    return statistics.median(alone), statistics.median(inside), ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", nargs="*", default=["float32", "bfloat16"])
    parser.add_argument("--past", type=int, nargs="*", default=[4096, 16384])
    parser.add_argument("--chunks", type=int, nargs="*", default=[128, 512, 2048])
    parser.add_argument("--block", type=int, help="scatter the history in blocks of this many tokens")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    for name in options.dtype:
        for past in options.past:
            for chunk in options.chunks:
                dtype = getattr(torch, name)
                alone, inside, ratio = measure(past, chunk, dtype, options.repeats, options.block)
                print(
                    f"{name} past {past} chunk {chunk}: primitive {alone * 1e3:.2f} ms, "
                    f"backend {inside * 1e3:.2f} ms, {ratio:.0%}"
                )


if __name__ == "__main__":
    with torch.inference_mode():
        main()
