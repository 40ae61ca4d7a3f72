"""Seconds of one rank's live code, each part where it stands alone: what a latency profile is made of.

The worker must hold no requests: its pool is used as scratch (values are irrelevant). A forward pass sums over the
tensor-parallel ranks, so all ranks are asked for the same at the same time.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from headway.attention.base import Segment
from headway.core.errors import InvariantError
from headway.worker.worker import Worker


def measure(worker: Worker, kind: str, first: int, second: int, repeats: int) -> float:
    """The fastest of a few runs: whatever else the machine does can only add.

    kind: "chunk", the attention of `first` tokens over `second` past ones; "decodes", of `first` requests with `second`
    past tokens each; "forward", a chunk of `first` tokens without history through the layers, one row to the LM head.
    """
    if kind == "forward":
        return _fastest(_forward(worker, first), repeats)
    if kind == "chunk":
        return _fastest(_attention(worker, [Segment(0, first, second, ((0, second + first),))], first), repeats)
    if kind == "decodes":
        each = second + 1
        segments = [Segment(i, 1, second, ((i * each, each),)) for i in range(first)]
        return _fastest(_attention(worker, segments, first), repeats)
    raise InvariantError(f"nobody knows how to measure {kind!r}")


def _fastest(run: Callable[[], object], repeats: int) -> float:
    """As many runs on every rank, and one before to warm up."""
    run()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)


def _attention(worker: Worker, segments: list[Segment], rows: int) -> Callable[[], None]:
    decoder, pool = worker.decoder, worker.pool
    config = decoder.config
    q_heads, kv_heads = config.q_heads, config.kv_heads
    qkv = torch.randn(rows, q_heads + 2 * kv_heads, config.head_dim).to(decoder.dtype)
    q, k, v = qkv[:, :q_heads], qkv[:, q_heads : q_heads + kv_heads], qkv[:, q_heads + kv_heads :]

    def run() -> None:
        with torch.inference_mode():
            plan = decoder.backend.plan(segments, pool)
            for layer in range(pool.layers):
                decoder.backend.run(layer, q, k, v, plan)

    return run


def _forward(worker: Worker, rows: int) -> Callable[[], None]:
    decoder, pool = worker.decoder, worker.pool
    config, shard = decoder.config, decoder.shard
    tokens = torch.arange(rows) % config.vocab_size
    positions = torch.arange(rows)
    arrived = torch.randn(rows, config.hidden_size).to(decoder.dtype)

    @torch.inference_mode()
    def run() -> None:
        plan = decoder.backend.plan([Segment(0, rows, 0, ((0, rows),))], pool)
        hidden = decoder.embed(tokens) if shard.first else arrived.clone()
        hidden = decoder.run_layers(hidden, decoder.rotary_table(positions), plan)
        if shard.last:
            decoder.head(hidden[-1:])

    return run
