"""Ask a latency model how long a batch takes, and how many tokens of a prompt fit a time budget."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headway.core.errors import ConfigError
from headway.perf.latency.base import MAX_CHUNK, BatchLoad, LatencyModel, load_s, solve_tokens


def fitted_latency(device: str, model: str, *, tp: int = 1, stages: int = 1) -> LatencyModel:
    """Return the latency model that ships for `device` ("a100-80gb") and `model` ("llama-3-8b"), cut into `tp`
    tensor-parallel ranks and `stages` pipeline stages: times of its last and slowest stage.

    Raises ConfigError that lists the names that exist. `docs/concepts/latency-models.md` says how wrong it is.
    """
    from headway.perf.hardware import ParallelLayout
    from headway.perf.latency.fitted import fitted

    return fitted(device, model, ParallelLayout(tp=tp, stages=stages), stages - 1)


def measured_latency(profile: str | Path) -> LatencyModel:
    """Return the latency model of a file that `headway profile` wrote. Raises ConfigError when it is not one."""
    from headway.perf.latency import table
    from headway.perf.latency.table import TableLatency

    return TableLatency(table.load(Path(profile), None))


@dataclass(frozen=True)
class ChunkSize:
    """The largest chunk of one prompt that keeps an iteration within its budget."""

    tokens: int
    """0: not even one token fits."""
    batch_s: float
    """Predicted seconds of the whole iteration with that chunk, decodes included."""


def chunk_size(
    latency: LatencyModel,
    budget_s: float,
    *,
    cached_tokens: int = 0,
    decodes: int = 0,
    decode_context: int = 0,
    limit: int = MAX_CHUNK,
) -> ChunkSize:
    """Size a chunk as the scheduler does: the most tokens of a prompt that fit an iteration of `budget_s` seconds.

    `cached_tokens` of the prompt are in the KV cache already. `decodes` requests decode in the same iteration, with
    `decode_context` tokens of context each. Raises ConfigError on a negative number.
    """
    if min(budget_s, cached_tokens, decodes, decode_context, limit) < 0:
        raise ConfigError("budget_s, cached_tokens, decodes, decode_context and limit cannot be negative")
    # Rows, requests and KV tokens of the decodes; the chunk is added to them below.
    load = BatchLoad(decodes, decodes, decodes * decode_context)
    tokens, attention_s = solve_tokens(latency, load, cached_tokens, limit, budget_s)
    whole = load.with_chunk(tokens, attention_s, cached_tokens) if tokens else load
    return ChunkSize(tokens, load_s(latency, whole))
