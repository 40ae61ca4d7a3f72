"""Measurements of single operations of one rank's live code, for latency profiles.

The worker must hold no requests: its pool is used as scratch (values are irrelevant). A forward pass sums over the
tensor-parallel ranks, so all ranks must run the same measurement at the same time.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from headway.core.errors import InvariantError
from headway.runtime.attention.base import AttentionPlan, BatchSegment
from headway.runtime.executor.group_attention import GroupAttention, RemoteQuery, RemoteRows
from headway.runtime.executor.worker import ModelWorker


def measure(worker: ModelWorker, kind: str, first: int, second: int, repeats: int) -> float:
    """Return the seconds of the fastest of `repeats` runs: other load on the host can only add time.

    kind: "chunk", the attention of `first` tokens over `second` past ones; "decodes", of `first` requests with `second`
    past tokens each; "forward", a chunk of `first` tokens without history through the layers, one row to the LM head.
    "ask": the time added to the attention of `first` rows when KV group `second` attends them as well, over one token;
    the rank in the same place of that group must run "visit" at the same time, which returns 0. "product": two square
    matrices of `first` rows; "read": a matrix of `first` MiB times a vector: what the device can at best.
    """
    if kind == "product":
        # Where a device multiplies bf16 slower than float32, its peak is that of float32.
        types = {worker.decoder.dtype, torch.float32}
        return min(_fastest(_product(worker, first, first, first, dtype), repeats) for dtype in types)
    if kind == "read":
        return _fastest(_product(worker, first << 8, 1024, 1, torch.float32), repeats)
    if kind == "ask":
        return _asking(worker, first, second, repeats)
    if kind == "visit":
        _fastest(_visiting(worker, first, second), repeats)
        return 0.0
    if kind == "forward":
        return _fastest(_forward(worker, first), repeats)
    if kind == "chunk":
        return _fastest(_attention(worker, [BatchSegment(0, first, second, ((0, second + first),))], first), repeats)
    if kind == "decodes":
        # Slots of the past and of the new token, disjoint for each request as in a real batch.
        each = second + 1
        segments = [BatchSegment(i, 1, second, ((i * each, each),)) for i in range(first)]
        return _fastest(_attention(worker, segments, first), repeats)
    raise InvariantError(f"{kind!r} is no kind of measurement")


def compute(worker: ModelWorker, rows: int) -> None:
    """Run rows without history through the layers: what the number of threads is chosen by."""
    _forward(worker, min(rows, worker.pool.slots))()


def _fastest(run: Callable[[], object], repeats: int) -> float:
    """Return the least time of `repeats` runs, after one to warm up. Runs are as many on every rank."""
    run()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)


def _attention(
    worker: ModelWorker, segments: list[BatchSegment], rows: int, plan: Callable[[], AttentionPlan] | None = None
) -> Callable[[], None]:
    """Return a function that attends `segments` in all layers. plan: replaces the backend's plan of them."""
    decoder, pool = worker.decoder, worker.pool
    config = decoder.config
    q_heads, kv_heads = config.q_heads, config.kv_heads
    qkv = torch.randn(rows, q_heads + 2 * kv_heads, config.head_dim).to(decoder.device, decoder.dtype)
    q, k, v = qkv[:, :q_heads], qkv[:, q_heads : q_heads + kv_heads], qkv[:, q_heads + kv_heads :]

    def run() -> None:
        with torch.inference_mode():
            # Planning is part of an iteration's time.
            planned = decoder.backend.plan(segments, pool) if plan is None else plan()
            for layer in range(pool.layers):
                decoder.backend.run(layer, q, k, v, planned)
            if decoder.device.type == "cuda":
                torch.cuda.synchronize(decoder.device)

    return run


def _asking(worker: ModelWorker, rows: int, owner: int, repeats: int) -> float:
    """Measure shared minus unshared attention: the cost of copies, messages, the remote group's plan, and the merge."""
    backend = worker.decoder.backend
    assert isinstance(backend, GroupAttention)
    segment = BatchSegment(0, rows, 0, ((0, rows),))
    alone_s = _fastest(_attention(worker, [segment], rows), repeats)
    shared = _attention(
        worker, [segment], rows, lambda: backend.share([segment], worker.pool, [RemoteQuery(owner, (segment,))], ())
    )
    return max(0.0, _fastest(shared, repeats) - alone_s)


def _visiting(worker: ModelWorker, rows: int, owner: int) -> Callable[[], None]:
    backend, pool = worker.decoder.backend, worker.pool
    assert isinstance(backend, GroupAttention)

    def run() -> None:
        with torch.inference_mode():
            plan = backend.share((), pool, (), [RemoteRows(owner, rows, [(0, 1)])])
            for layer in range(pool.layers):
                backend.answer_queries(layer, plan)

    return run


def _product(worker: ModelWorker, rows: int, inner: int, columns: int, dtype: torch.dtype) -> Callable[[], None]:
    """Return a function that multiplies rows x inner by inner x columns."""
    device = worker.decoder.device
    left = torch.ones(rows, inner, dtype=dtype, device=device)
    right = torch.ones(inner, columns, dtype=dtype, device=device)

    @torch.inference_mode()
    def run() -> None:
        torch.mv(left, right[:, 0]) if columns == 1 else torch.mm(left, right)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return run


def _forward(worker: ModelWorker, rows: int) -> Callable[[], None]:
    decoder, pool = worker.decoder, worker.pool
    config, shard = decoder.config, decoder.shard
    tokens = torch.arange(rows) % config.vocab_size
    positions = torch.arange(rows)
    arrived = torch.randn(rows, config.hidden_size).to(decoder.device, decoder.dtype)

    @torch.inference_mode()
    def run() -> None:
        plan = decoder.backend.plan([BatchSegment(0, rows, 0, ((0, rows),))], pool)
        hidden = decoder.embed(tokens) if shard.first else arrived.clone()
        hidden = decoder.run_layers(hidden, decoder.rotary_table(positions), plan)
        if shard.last:
            decoder.head(hidden[-1:])

    return run
