"""Long prompts for traces that have none: PecSched §6.2 replaces the longest ones by 100K to 500K tokens.

Public traces of chat services end near 10K. Both rules keep arrivals and outputs, class what they lengthen `long` and
the rest `short`, and are named in every result that rests on them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from headway.core.errors import ConfigError
from headway.sim.workload.trace_request import TraceRequest

LOW, HIGH = 100_000, 500_000
LINEAR_FROM = 4096
Requests = list[TraceRequest]


def above_p95(requests: Sequence[TraceRequest], rng: np.random.Generator) -> Requests:
    """Apply the paper's rule: prompts above the 95th percentile become uniform in 100K to 500K.

    Where many prompts equal the percentile, fewer than 5% are above it.
    """
    if not requests:
        return []
    limit = float(np.quantile([request.prompt_tokens for request in requests], 0.95))
    # drawn for every request, so that a request's length does not depend on the others
    drawn = rng.integers(LOW, HIGH + 1, len(requests)).tolist()
    return [
        _long(request, length) if request.prompt_tokens > limit else replace(request, klass="short")
        for request, length in zip(requests, drawn, strict=True)
    ]


def linear(requests: Sequence[TraceRequest], rng: np.random.Generator) -> Requests:
    """Map prompts of 4,096 tokens and more linearly to 100K … 500K: 4,096 to 100K, the trace's longest to 500K.

    Nothing is drawn, so the order of lengths is kept.
    """
    top = max((request.prompt_tokens for request in requests), default=0)
    # at least 1: the longest prompt may be LINEAR_FROM itself
    slope = (HIGH - LOW) / max(1, top - LINEAR_FROM)
    return [
        _long(request, LOW + round((request.prompt_tokens - LINEAR_FROM) * slope))
        if request.prompt_tokens >= LINEAR_FROM
        else replace(request, klass="short")
        for request in requests
    ]


def _long(request: TraceRequest, tokens: int) -> TraceRequest:
    return replace(request, prompt_tokens=tokens, cached_tokens=0, text=None, klass="long")


RULES: dict[str, Callable[[Sequence[TraceRequest], np.random.Generator], Requests]] = {
    "p95-uniform": above_p95,
    "linear-4096": linear,
}


def rewrite(requests: Sequence[TraceRequest], rule: str, rng: np.random.Generator) -> Requests:
    """Apply a rule by name. Raises ConfigError, which lists the names."""
    if rule not in RULES:
        raise ConfigError(f"unknown rule for long requests {rule!r}; known are {', '.join(RULES)}")
    return RULES[rule](requests, rng)


def with_long_share(requests: Sequence[TraceRequest], share: float, rng: np.random.Generator) -> Requests:
    """Drop long requests at random until about `share` of all requests are long.

    The paper's figures and its 5% do not fit together (docs/papers/pecsched.md); this sets a load class by class.
    """
    longs = sum(request.klass == "long" for request in requests)
    if not longs:
        return list(requests)
    shorts = len(requests) - longs
    # longs · keep / (longs · keep + shorts) = share, solved for keep
    keep = min(1.0, share * shorts / (1 - share) / longs) if share < 1 else 1.0
    drawn = rng.random(len(requests)).tolist()
    return [r for r, chance in zip(requests, drawn, strict=True) if r.klass != "long" or chance < keep]
