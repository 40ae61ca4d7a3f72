"""What re-balancing KV onto a larger group adds to a chunk of a long prefill (Tetris Fig. 14): transfer on and off.

Run: python benchmarks/sequence_parallel.py [--tokens 32768] [--ratios 0.25 0.5 1 2] [--layers 4] [--repeats 3].
Two ranks are two processes over gloo with a thread each; the shape is the small Llama of this repository's CPU figures
(hidden 512, 8 query and 2 KV heads of 64, MLP 1536) with --layers layers. A prompt of --tokens has a first chunk whose
KV is on the first rank, and a second one that both compute; --ratios are first over second. "on": the first rank's KV
is balanced, layer by layer, while the second chunk is computed. "off": the same computation with the KV balanced
before. Runs alternate; the fastest of each is compared, and the overhead is over the second chunk alone, as in Fig. 14.
`serial` is what moving all layers takes when nothing is computed meanwhile.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tests.helpers.random_weights import random_decoder, reference_config

from headway.core.span import Strategy
from headway.runtime.attention.kv_pool import KvPool
from headway.runtime.executor.gloo_links import join, rendezvous
from headway.runtime.model.decoder import DecoderModel
from headway.runtime.sequence_parallel.chunk import ChunkPlan
from headway.runtime.sequence_parallel.gloo import GlooTransport
from headway.runtime.sequence_parallel.group import ChunkSpec, SpGroup
from headway.runtime.sequence_parallel.kv_shard import KvShard
from headway.runtime.sequence_parallel.layout import EMPTY, KvLayout
from headway.runtime.sequence_parallel.prefill import SequencePrefill, hand_over

RANKS = 2


class Bench:
    """One rank's side of every measurement."""

    def __init__(self, rank: int, options: argparse.Namespace) -> None:
        self.rank, self.options = rank, options
        config = replace(reference_config(options.tokens + 8), layers=options.layers)
        self.decoder: DecoderModel = random_decoder(config, getattr(torch, options.dtype))
        self.transport = GlooTransport()

    def layouts(self, history: int) -> dict[str, KvLayout]:
        """Where KV of the first chunk is: on the first rank, or half of it on each."""
        config = self.decoder.config
        alone = ChunkPlan(ChunkSpec(0, history, SpGroup((0,))), EMPTY, config).after
        return {"on": alone, "off": ChunkPlan(self.spec(history), alone, config).history}

    def spec(self, history: int) -> ChunkSpec:
        return ChunkSpec(history, self.options.tokens, SpGroup((0, 1)), Strategy(attn=self.options.attn))

    def shard(self, layout: KvLayout) -> KvShard | None:
        """This rank's KV, random: what it says does not matter to time."""
        if self.rank not in layout:
            return None
        config, held = self.decoder.config, layout[self.rank]
        pool = KvPool(config.layers, len(held.heads), self.options.tokens, config.head_dim, self.decoder.dtype)
        pool.data.normal_()
        return KvShard(pool, [(0, self.options.tokens)])

    def chunk_s(self, history: int, layout: KvLayout) -> float:
        """Seconds of the second chunk, from when both ranks begin to when both are done."""
        prefill = SequencePrefill(self.decoder, self.decoder.config, self.transport)
        prefill.adopt(layout, self.shard(layout))
        tokens = np.arange(self.options.tokens - history) % self.decoder.config.vocab_size
        dist.barrier()
        start = time.perf_counter()
        prefill.begin(self.spec(history), torch.from_numpy(tokens))
        prefill.run()
        prefill.finish()
        dist.barrier()
        return time.perf_counter() - start

    def serial_s(self, history: int) -> float:
        """Seconds of the transfer alone."""
        layouts = self.layouts(history)
        source, target = self.shard(layouts["on"]), self.shard(layouts["off"])
        dist.barrier()
        start = time.perf_counter()
        hand_over(self.transport, layouts["on"], layouts["off"], source, target, self.decoder.config.layers)
        dist.barrier()
        return time.perf_counter() - start

    def ratio(self, ratio: float) -> str:
        tokens = self.options.tokens
        history = round(tokens * ratio / (1 + ratio))
        layouts = self.layouts(history)
        times: dict[str, list[float]] = {"on": [], "off": []}
        for _ in range(self.options.repeats):
            for name, layout in layouts.items():
                times[name].append(self.chunk_s(history, layout))
        serial = min(self.serial_s(history) for _ in range(3))
        on, off = min(times["on"]), min(times["off"])
        spread = (max(times["off"]) - off) / off
        return (
            f"{ratio:>7} {history:>9} {tokens - history:>9} {off:>8.2f} {on:>8.2f} {on / off - 1:>+9.1%} "
            f"{serial:>9.3f} {serial / off:>8.1%} {spread:>8.1%}"
        )


def rank_main(rank: int, port: int, options: argparse.Namespace, lines: Any) -> None:
    torch.set_num_threads(1)
    join(rank, RANKS, rendezvous("127.0.0.1", port, 120.0), 120.0)
    bench = Bench(rank, options)
    for ratio in options.ratios:
        line = bench.ratio(ratio)
        if rank == 0:
            lines.put(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.25, 0.5, 1.0, 2.0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--attn", choices=("ring", "ulysses"), default="ring")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    options = parser.parse_args()
    store = rendezvous("127.0.0.1", None, 120.0)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["headway.runtime.sequence_parallel.prefill"])
    lines = context.SimpleQueue()
    processes = [
        context.Process(target=rank_main, args=(rank, store.port, options, lines), daemon=True) for rank in range(RANKS)
    ]
    for process in processes:
        process.start()
    print(
        f"{options.attn}, {options.dtype}, {options.layers} layers, {options.tokens} tokens, {RANKS} ranks of 1 thread"
    )
    print("  ratio   history     chunk   off (s)   on (s)  overhead  serial (s)  of off   spread", flush=True)
    for _ in options.ratios:
        print(lines.get(), flush=True)
    for process in processes:
        process.join(30.0)


if __name__ == "__main__":
    main()
