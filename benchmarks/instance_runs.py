"""What a prompt takes that instances compute together, against one instance alone.

Run: python benchmarks/instance_runs.py [--tokens 4096] [--layers 4] [--dtype bfloat16] [--repeats 5].
Instances are processes with a thread each, and a socket between each two; the shape is the small Llama of this
repository's CPU figures (hidden 512, 8 query and 2 KV heads of 64, MLP 1536) with --layers layers. "alone" is the
scheduler's way: one chunk of all tokens. The rest are runs, KV in the instance's pool. Medians of seconds from when all
begin to when the last is done; runs of different kinds alternate. Groups of more instances than cores measure cores.
Then a token that is decoded behind the prompt: alone, by a run of one, and in place over the KV of a group.

With --rows 256 512 … each run of a ring is computed with so many rows of an instance at once (`span_rows` of a cluster
file; 0: all): how long it takes, how long a pause or a message has to wait at most (the longest time between two layer
edges), and by how much its process's memory has grown beyond what it was before the first run.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import statistics
import tempfile
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.helpers.random_weights import random_decoder, reference_config

from headway.core.batch import Chunk, DecodeGroup, GroupBatch, KvOp
from headway.core.sampling import SamplingParams
from headway.core.span import Strategy
from headway.runtime.engine.instance_protocol import ComputeSpan, SpanTask
from headway.runtime.executor.worker import ModelWorker
from headway.runtime.kv_transfer.peers import PeerAddress, PeerNetwork
from headway.runtime.sequence_parallel.span_executor import SpanExecutor

GREEDY = SamplingParams(temperature=0.0)
BLOCK = 64


class Bench:
    """One instance's side of every measurement."""

    def __init__(self, number: int, folder: Path, instances: int, options: argparse.Namespace) -> None:
        self.number, self.options = number, options
        config = replace(reference_config(options.tokens + options.steps + 8), layers=options.layers)
        decoder = random_decoder(config, getattr(torch, options.dtype))
        self.worker = ModelWorker(decoder, 2 * options.tokens // BLOCK + 1, BLOCK, ())
        self.peers = PeerNetwork(number, 0, f"unix:{folder}/{number}")
        self.peers.meet([PeerAddress(other, 0, f"unix:{folder}/{other}") for other in range(instances)])
        self.runs = SpanExecutor(self.worker, self.peers, ())
        prompt = np.random.default_rng(0).integers(3, config.vocab_size, options.tokens, dtype=np.int32)
        self.steps: list[float] = []
        self.epoch = 1
        self.prompt = memoryview(prompt.tobytes())

    def alone(self, name: str) -> None:
        tokens = self.options.tokens
        self.worker.admit(name, tokens, self.prompt, GREEDY)
        self.worker.replay((KvOp("reserve", name, -(-(tokens + self.options.steps) // BLOCK)),))
        self.worker.run(GroupBatch(0, DecodeGroup(), (Chunk(name, 0, tokens, True),)))
        for step in range(self.options.steps):
            start = time.perf_counter()
            self.worker.run(GroupBatch(0, DecodeGroup((name,), tokens + step + 1, self.epoch)))
            self.steps.append(time.perf_counter() - start)
        self.epoch += 1
        self.worker.replay((KvOp("free", name, 0),))
        self.worker.forget(name)

    def run(self, name: str, attn: str, group: tuple[int, ...], layer: list[float], rows: int = 0) -> None:
        tokens = self.options.tokens
        self.runs.admit(name, self.prompt, GREEDY, ())
        run = SpanTask(0, tokens, group, Strategy(attn=attn), rows=rows)  # type: ignore[arg-type]
        compute = ComputeSpan(id=name, index=0, run=run, last=True, preemptible=True)
        self.runs.begin(compute, lambda count, anew: [(0, count)], lambda: None)
        self.runs.go(name, lambda: False, lambda done: layer.append(time.perf_counter()))
        drawn, _ = self.runs.finish(name)
        for step in range(tokens, tokens + self.options.steps):
            start = time.perf_counter()
            one = SpanTask(step, step + 1, group, Strategy(attn=attn), in_place=True)  # type: ignore[arg-type]
            said = (3,) if drawn is None else (drawn.token,)
            compute = ComputeSpan(id=name, index=step, run=one, drawn=said, last=True)
            self.runs.begin(compute, lambda count, anew: [(0, count)], lambda: None)
            self.runs.go(name, None, lambda done: None)
            drawn, _ = self.runs.finish(name)
            self.steps.append(time.perf_counter() - start)
        self.runs.forget(name)
        self.peers.forget(name)


def by_rows(bench: Bench, instances: int, options: argparse.Namespace, together: Any, out: Any) -> None:
    """Runs of all sizes in turn; the least memory first, as what a process has taken it keeps."""
    bench.options.steps = 0
    sizes = sorted({1, *options.groups})
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for turn in range(options.repeats + 1):
        for rows in sorted(options.rows, key=lambda rows: rows or options.tokens):
            for size in sizes:
                together.wait()
                start, edges = time.perf_counter(), list[float]()
                if bench.number < size:
                    bench.run(f"{rows}.{size}.{turn}", "ring", tuple(range(size)), edges, rows)
                together.wait()
                longest = max(b - a for a, b in pairwise([start, *edges])) if edges else 0.0
                grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base
                if bench.number == 0:
                    out.put((rows, size, turn, time.perf_counter() - start, longest, grown / 1024))
    bench.peers.close()


def instance_main(
    number: int, folder: Path, instances: int, options: argparse.Namespace, together: Any, out: Any
) -> None:
    torch.set_num_threads(1)
    bench = Bench(number, folder, instances, options)
    if options.rows:
        by_rows(bench, instances, options, together, out)
        return
    kinds: list[tuple[str, int]] = [("alone", 1), ("ring", 1)]
    kinds += [(attn, size) for size in options.groups for attn in ("ring", "striped", "ulysses")]
    for turn in range(options.repeats + 1):
        for attn, size in kinds:
            together.wait()
            start, layers = time.perf_counter(), list[float]()
            if number < size:
                if attn == "alone":
                    bench.alone(f"a{turn}")
                else:
                    bench.run(f"{attn}{size}.{turn}", attn, tuple(range(size)), layers)
            together.wait()
            if number == 0 and turn:
                decode = sum(bench.steps)
                out.put((attn, size, time.perf_counter() - start - decode, statistics.median(bench.steps)))
            bench.steps.clear()
    bench.peers.close()


def show_rows(options: argparse.Namespace, found: list[tuple[int, int, int, float, float, float]]) -> None:
    print(f"{options.tokens} tokens, {options.dtype}, {options.layers} layers, instances of 1 thread, ring")
    print("rows      instances  median (s)     least  longest to an edge (ms)  memory, first run (MiB)")
    for rows, size in sorted({one[:2] for one in found}, key=lambda key: (key[1], key[0] or options.tokens)):
        mine = [one for one in found if one[:2] == (rows, size) and one[2]]
        first = next(one for one in found if one[:2] == (rows, size) and not one[2])
        seconds = [one[3] for one in mine]
        wait = statistics.median(one[4] for one in mine)
        print(f"{rows or 'all':<10}{size:>9} {statistics.median(seconds):>11.3f} {min(seconds):>9.3f}", end="")
        print(f" {1000 * wait:>24.1f} {first[5]:>24.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--groups", type=int, nargs="+", default=[2])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--rows", type=int, nargs="+", default=[], help="rows at once: compare these, and nothing else")
    options = parser.parse_args()
    instances, sizes = max(options.groups), {1, *options.groups}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["headway.runtime.sequence_parallel.span_executor"])
    together, out = context.Barrier(instances), context.SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="hw-") as folder:
        processes = [
            context.Process(
                target=instance_main, args=(n, Path(folder), instances, options, together, out), daemon=True
            )
            for n in range(instances)
        ]
        for process in processes:
            process.start()
        if options.rows:
            show_rows(options, [out.get() for _ in range((options.repeats + 1) * len(options.rows) * len(sizes))])
            return
        times: dict[tuple[str, int], list[float]] = {}
        steps: dict[tuple[str, int], list[float]] = {}
        for _ in range(options.repeats * (2 + 3 * len(options.groups))):
            attn, size, seconds, step = out.get()
            times.setdefault((attn, size), []).append(seconds)
            steps.setdefault((attn, size), []).append(step)
        for process in processes:
            process.join(30.0)
    print(f"{options.tokens} tokens, {options.dtype}, {options.layers} layers, instances of 1 thread")
    print("kind      instances  median (s)     least      most  speed-up  token (ms)")
    alone = statistics.median(times["alone", 1])
    for (attn, size), found in times.items():
        middle = statistics.median(found)
        print(
            f"{attn:<10}{size:>9} {middle:>11.3f} {min(found):>9.3f} {max(found):>9.3f} {alone / middle:>8.2f}x", end=""
        )
        print(f" {1000 * statistics.median(steps[attn, size]):>11.2f}")


if __name__ == "__main__":
    main()
