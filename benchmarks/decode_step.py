"""How long a decode step takes beside the least it could: reading every weight and every live key and value once.

Run: python benchmarks/decode_step.py [--context 1024] [--dtype bfloat16] [--steps 100]. The reference shape is a small
Llama (hidden 512, 8 layers, 8 query and 2 KV heads of 64, MLP 1536, vocabulary 4096). Prints, per batch size, the
measured read bandwidth, the bytes, the limit, minimum and median of the step (forward and greedy sampling), and the
time beyond the limit.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from tests.helpers.random_weights import random_decoder, reference_config

from headway.core.request import SamplingParams
from headway.runtime.attention.backend import BatchSegment
from headway.runtime.engine.config import settle
from headway.runtime.model.decoder import DecoderModel
from headway.runtime.model.sampling import make_state, sample


def read_bandwidth(megabytes: int = 256, repeats: int = 15) -> float:
    """Bytes per second of a large sum: the fastest of several."""
    data = torch.ones(megabytes * 2**20 // 4)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        data.sum()
        times.append(time.perf_counter() - start)
    return data.numel() * 4 / min(times)


def weight_bytes(decoder: DecoderModel) -> int:
    """Bytes of weights that a decode step reads: all but the embedding table."""
    embedding = decoder.weights.embedding
    held = decoder.weights.parameters - (embedding.numel() if embedding is not None else 0)
    return held * decoder.dtype.itemsize


def step_times(decoder: DecoderModel, batch: int, context: int, steps: int, block: int | None) -> list[float]:
    """Seconds of `steps` decode steps of `batch` requests that hold `context` tokens each."""
    span = context + steps + 8
    pool = decoder.make_pool(batch * span)
    pool.data.normal_()
    states = [make_state(SamplingParams(temperature=0.0), [1], decoder.config.vocab_size, [2]) for _ in range(batch)]
    tokens = torch.zeros(batch, dtype=torch.int64)
    times = []
    for step in range(steps + 5):
        start = time.perf_counter()
        past = context + step - 5
        segments = [BatchSegment(row, 1, past, _runs(row, batch, span, block)) for row in range(batch)]
        positions = torch.full((batch,), past, dtype=torch.int64)
        plan = decoder.backend.plan(segments, pool)
        logits = decoder.forward(tokens, positions, plan, None)
        tokens = torch.tensor([drawn.token for drawn in sample(logits, states, [past] * batch)])
        times.append(time.perf_counter() - start)
    return times[5:]


def _runs(row: int, batch: int, span: int, block: int | None) -> tuple[tuple[int, int], ...]:
    """A request's slots: one run, or blocks interleaved with those of the others."""
    if block is None:
        return ((row * span, span),)
    return tuple(((index * batch + row) * block, block) for index in range(span // block))


def main() -> None:
    settle()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--block", type=int, help="interleave the requests' slots in blocks of this many tokens")
    options = parser.parse_args()
    decoder = random_decoder(reference_config(), getattr(torch, options.dtype))
    bandwidth = read_bandwidth()
    weights = weight_bytes(decoder)
    print(f"read {bandwidth / 1e9:.1f} GB/s, {torch.get_num_threads()} threads, weights {weights / 1e6:.1f} MB")
    for batch in options.batches:
        kept = batch * options.context * decoder.make_pool(1).nbytes
        limit = (weights + kept) / bandwidth
        times = step_times(decoder, batch, options.context, options.steps, options.block)
        low, median = min(times), statistics.median(times)
        print(
            f"batch {batch}: KV {kept / 1e6:.1f} MB, limit {limit * 1e3:.2f} ms, min {low * 1e3:.2f} ms, "
            f"median {median * 1e3:.2f} ms = limit + {(median - limit) * 1e3:.2f} ms ({limit / median:.0%})"
        )


if __name__ == "__main__":
    main()
