"""Checks, before anything is started, that a model fits a layout and that a layout fits this host. No torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from headway.core.errors import ConfigError
from headway.perf.hardware.memory import gib
from headway.perf.latency.layout import ParallelLayout
from headway.runtime.executor.rank_layout import places
from headway.runtime.model.config import DecoderConfig
from headway.runtime.model.shard import WHOLE, ModelShard, divides

WORKER_BYTES = 160 << 20
"""Memory of a worker process besides weights and KV: its libraries' private memory (measured, PSS)."""


class MemoryNeed(NamedTuple):
    """Bytes of all ranks together."""

    weights: int
    kv_per_token: int
    """Keys and values of one token, which lies in one KV group."""
    processes: int
    """See `WORKER_BYTES`."""


def need(config: DecoderConfig, layout: ParallelLayout, itemsize: int) -> MemoryNeed:
    """Return the memory that a layout takes. itemsize: bytes of a weight and of a number in the cache."""
    shards = [place.shard for place in places(layout)]
    weights = sum(numbers(config, shard) for shard in shards) * itemsize
    pairs = [len(shard.layers(config)) * len(shard.kv_heads(config)) for shard in shards]
    # A token lies in one of the kvp groups, but `pairs` counts the ranks of all of them. 2: keys and values.
    per_token = sum(pairs) // layout.kvp * 2 * config.head_dim * itemsize
    return MemoryNeed(weights, per_token, WORKER_BYTES * len(shards))


def numbers(config: DecoderConfig, shard: ModelShard) -> int:
    """Return how many weights a rank holds (without norms and biases, which are below 0.1%)."""
    q, kv = (len(heads) * config.head_dim for heads in (shard.q_heads(config), shard.kv_heads(config)))
    # q and out have hidden x q weights each, k and v hidden x kv, gate, up and down hidden x mlp.
    layer = config.hidden_size * (2 * q + 2 * kv + 3 * len(shard.mlp(config)))
    words = len(shard.vocabulary(config)) * config.hidden_size
    return len(shard.layers(config)) * layer + (shard.first + shard.last) * words


def parameters(config: DecoderConfig) -> int:
    """Return how many weights a process with the whole model holds: norms and biases too, a tied head twice."""
    q, kv = config.q_heads * config.head_dim, config.kv_heads * config.head_dim
    norms = 2 * config.hidden_size + 2 * config.head_dim * config.qk_norm
    biases = (q + 2 * kv) * config.qkv_bias + config.hidden_size * config.out_bias
    biases += (2 * config.mlp_size + config.hidden_size) * config.mlp_bias
    return numbers(config, WHOLE) + config.layers * (norms + biases) + config.hidden_size


def check_shape(config: DecoderConfig, layout: ParallelLayout) -> None:
    """Raise ConfigError, with the numbers and the nearest layouts that can be, when the model cannot be cut so."""
    problem = None
    if not divides(config, layout.tp):
        problem = (
            f"{config.q_heads} query heads and {config.kv_heads} KV heads cannot be cut evenly over "
            f"--tensor-parallel-size {layout.tp}"
        )
    elif layout.stages > config.layers:
        problem = f"{config.layers} layers cannot make --pipeline-parallel-size {layout.stages} stages"
    if problem is not None:
        raise ConfigError(f"{problem}: {_nearest(config, layout, 'can be', lambda other: True)}")


def check_memory(
    config: DecoderConfig, layout: ParallelLayout, itemsize: int, available: int, kv_bytes: int | None, tokens: int
) -> None:
    """Raise ConfigError when the layout does not fit the memory.

    That is when weights, and the cache of one request of `tokens` tokens, exceed `available`, the bytes for all ranks
    of this host, or when that request exceeds `kv_bytes`, the bytes reserved for the caches of all KV groups together:
    a long request lies in all of them.
    """

    def takes(other: ParallelLayout) -> tuple[MemoryNeed, int]:
        wanted = need(config, other, itemsize)
        cache = wanted.kv_per_token * tokens
        return wanted, wanted.weights + wanted.processes + max(cache, kv_bytes or 0)

    wanted, total = takes(layout)
    cache = wanted.kv_per_token * tokens
    if kv_bytes is not None and cache > kv_bytes:
        over = f"{layout.kvp} groups of " if layout.kvp > 1 else ""
        raise ConfigError(
            f"one request of {tokens} tokens needs {gib(cache)} of KV cache ({wanted.kv_per_token} bytes a token over "
            f"{over}{layout.tp * layout.stages} workers) and --kv-cache-memory gives {gib(kv_bytes)}: give it more or "
            "lower --max-model-len"
        )
    if total > available:
        raise ConfigError(
            f"{layout.name} needs {gib(total)}: {gib(wanted.weights)} of weights, {gib(wanted.processes)} for "
            f"{layout.accelerators} processes and {gib(max(cache, kv_bytes or 0))} of KV cache (one request of "
            f"{tokens} tokens takes {gib(cache)}); {gib(available)} is available. Lower --max-model-len or "
            "--kv-cache-memory; " + _nearest(config, layout, "fit", lambda other: takes(other)[1] <= available)
        )


def _nearest(config: DecoderConfig, asked: ParallelLayout, do: str, fits: Callable[[ParallelLayout], bool]) -> str:
    """Return the phrase "nearest that `do` …" with the possible and fitting layouts that are closest to `asked`."""
    candidates = [
        ParallelLayout(tp=tp, stages=stages, kvp=kvp)
        for tp in range(1, 2 * asked.tp + 1)
        for stages in range(1, min(2 * asked.stages, config.layers) + 1)
        for kvp in range(1, asked.kvp + 1)
        if divides(config, tp)
    ]
    candidates.sort(key=lambda other: _distance(asked, other))
    near = [other for other in candidates if other != asked and fits(other)][:3]
    if not near:
        return "no layout of this model fits"
    words = [f"{o.tp} x {o.stages} x {o.kvp}" for o in near]
    return f"nearest that {do} (tensor x pipeline x KV parallel size): {', '.join(words)}"


def _distance(asked: ParallelLayout, other: ParallelLayout) -> tuple[int, int, int]:
    steps = abs(asked.tp - other.tp) + abs(asked.stages - other.stages) + abs(asked.kvp - other.kvp)
    return (steps, abs(asked.accelerators - other.accelerators), -other.tp)
