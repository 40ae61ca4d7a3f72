"""The setting `chunking`: chunks of whole prompts, of a fixed budget of tokens, or as large as fits a time. Which
prefills get them is decided in `policy.iteration.decision`."""

from __future__ import annotations

from typing import Protocol

import msgspec

from headway.core.errors import ConfigError
from headway.perf.latency.base import BatchLoad, LatencyModel, load_s, solve_tokens


class PrefillDemand(msgspec.Struct, frozen=True, gc=False):
    """One prefill to be sized. All in tokens."""

    past: int
    """Cached tokens that the chunk attends."""
    remaining: int
    """Tokens left to compute."""
    limit: int
    """Most tokens that the iteration still takes."""
    decode_s: float | None = None
    """Seconds of the load's decodes, if they are known."""


def is_empty(load: BatchLoad) -> bool:
    """Whether an iteration computes nothing yet: no rows, and no attention for other groups."""
    return not (load.tokens or load.decodes or load.chunk_s)


class ChunkingStrategy(Protocol):
    """Size of a prefill's chunk in one iteration. Implementations are pure."""

    name: str
    timed: bool
    """Whether chunks are sized by the time budget; other strategies ignore it."""
    most: int | None
    """The strategy's own limit on the tokens of an iteration; None: `max_num_batched_tokens`, which a single prompt may
    exceed under `whole`."""

    def quota(self, ask: PrefillDemand, load: BatchLoad, budget_s: float, latency: LatencyModel) -> tuple[int, float]:
        """Return (tokens, seconds of their attention) to add to `load`; (0, 0.0): none."""


class WholePrompt:
    """All of the prompt at once, as engines did before chunked prefill; a batch takes several only up to `limit`."""

    name = "whole"
    timed = False
    most: int | None = None

    def quota(self, ask: PrefillDemand, load: BatchLoad, budget_s: float, latency: LatencyModel) -> tuple[int, float]:
        # More tokens than decodes: the batch has a prompt already.
        if load.tokens > load.decodes and ask.remaining > ask.limit:
            return 0, 0.0
        return ask.remaining, latency.attention_s(ask.past, ask.remaining)


class StaticBudget:
    """A budget of tokens an iteration, decodes included (Sarathi-Serve's chunked prefill)."""

    timed = False

    def __init__(self, tokens: int) -> None:
        self.name = f"static:{tokens}"
        self.tokens = tokens
        self.most: int | None = tokens

    def quota(self, ask: PrefillDemand, load: BatchLoad, budget_s: float, latency: LatencyModel) -> tuple[int, float]:
        tokens = min(ask.remaining, ask.limit, self.tokens - load.tokens)
        return (tokens, latency.attention_s(ask.past, tokens)) if tokens > 0 else (0, 0.0)


class AdaptiveChunks:
    """The largest chunk that keeps the iteration within its time (Medha §3.2, Algorithm 2): large at first, smaller
    as the cache grows. `subtract` is the printed form, which charges a chunk as if it ran alone."""

    timed = True
    most: int | None = None

    def __init__(self, subtract: bool = False) -> None:
        self.name = "adaptive"
        self.subtract = subtract

    def quota(self, ask: PrefillDemand, load: BatchLoad, budget_s: float, latency: LatencyModel) -> tuple[int, float]:
        limit = min(ask.remaining, ask.limit)
        if self.subtract:
            # As printed: the chunk is solved against an empty batch, so its fixed cost is charged a second time.
            left_s = budget_s - (0.0 if is_empty(load) else load_s(latency, load))
            return solve_tokens(latency, BatchLoad(), ask.past, limit, left_s)
        return solve_tokens(latency, load, ask.past, limit, budget_s, ask.decode_s)


def make_chunking(spec: str, subtract: bool = False) -> ChunkingStrategy:
    """`adaptive`, `whole` or `static:N`; raises ConfigError otherwise."""
    if spec == "adaptive":
        return AdaptiveChunks(subtract)
    if spec == "whole":
        return WholePrompt()
    kind, _, tokens = spec.partition(":")
    if kind == "static" and tokens.isdigit() and int(tokens) > 0:
        return StaticBudget(int(tokens))
    raise ConfigError(f"unknown chunking {spec!r}: choose adaptive, whole, or static:N with N tokens, e.g. static:512")
