"""Transformations of workloads: slices, rate, lengths, classes, and long prompts for traces that have none (PecSched
§6.2).

Pure functions of requests in order of arrival.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from headway.core.errors import ConfigError
from headway.core.parse import duration, tokens
from headway.sim.workload.generate import ArrivalProcess, PoissonArrivals
from headway.sim.workload.traces import PromptText, RequestTrace, TraceRequest

Requests = list[TraceRequest]


def rebase(requests: Iterable[TraceRequest]) -> Requests:
    """Sort by arrival (stable) and shift so that the first request arrives at 0."""
    ordered = sorted(requests, key=lambda request: request.arrival_s)
    return [replace(request, arrival_s=request.arrival_s - ordered[0].arrival_s) for request in ordered]


def slice_time(requests: Iterable[TraceRequest], start_s: float, stop_s: float) -> Requests:
    """Return the requests that arrive in [start, stop), rebased."""
    return rebase(request for request in requests if start_s <= request.arrival_s < stop_s)


_TIME_ENDS = ("s", "n", "h")


def slice_by(requests: Sequence[TraceRequest], text: str) -> Requests:
    """Slice by `100:400` (count) or `60s:120s` (time); either side may be empty. Raises ConfigError otherwise."""
    left, colon, right = (part.strip() for part in text.partition(":"))
    try:
        if not colon:
            raise ValueError
        # either side in seconds, minutes or hours makes it a slice by time
        if left[-1:] in _TIME_ENDS or right[-1:] in _TIME_ENDS:
            return slice_time(requests, duration(left or 0), duration(right) if right else float("inf"))
        return rebase(requests[tokens(left or 0) : tokens(right) if right else None])
    except (ConfigError, ValueError):
        raise ConfigError(f"cannot slice by {text!r}; write 100:400 (requests) or 60s:120s (seconds)") from None


def rescale_to_rate(requests: Sequence[TraceRequest], rate_rps: float) -> Requests:
    """Stretch time so that the mean rate, of n - 1 gaps, is `rate_rps`; rebased."""
    ordered = rebase(requests)
    if len(ordered) < 2:
        return ordered
    if ordered[-1].arrival_s == 0:
        raise ConfigError(
            f"all {len(ordered)} requests arrive at the same time, which cannot be stretched to {rate_rps:g} a second: "
            "draw arrivals at that rate (poisson, gamma, constant), or leave the rate out"
        )
    factor = (len(ordered) - 1) / ordered[-1].arrival_s / rate_rps
    return [replace(request, arrival_s=request.arrival_s * factor) for request in ordered]


def clip_lengths(
    requests: Iterable[TraceRequest], max_prompt: int | None = None, max_output: int | None = None
) -> Requests:
    """Clip lengths to [1, max]; no request is dropped."""

    def clipped(count: int, most: int | None) -> int:
        return max(1, count if most is None else min(count, most))

    return [
        replace(
            request,
            prompt_tokens=clipped(request.prompt_tokens, max_prompt),
            cached_tokens=min(request.cached_tokens, clipped(request.prompt_tokens, max_prompt)),
            output_tokens=clipped(request.output_tokens, max_output),
            text=_clipped_text(request, max_prompt, max_output),
        )
        for request in requests
    ]


def _clipped_text(request: TraceRequest, max_prompt: int | None, max_output: int | None) -> PromptText | None:
    """Return the text of a clipped request: without its answer if that is clipped, or no longer follows the prompt."""
    text, prompt = request.text, request.prompt_tokens
    if text is None or not ((max_prompt or prompt) < prompt or (max_output or text.tokens) < request.output_tokens):
        return text
    return text.cut(min(prompt, max_prompt or prompt))


def spread_batches(requests: Sequence[TraceRequest], rng: np.random.Generator) -> Requests:
    """Spread requests that share a time stamp (traces with coarse clocks) uniformly up to the next stamp.

    The last stamp's are spread over the median distance between stamps. Order between stamps and counts are kept.
    """
    stamps = sorted({request.arrival_s for request in requests})
    if len(stamps) < 2:
        return list(requests)
    # width of a stamp: the distance to the next one
    widths = dict(zip(stamps, [*np.diff(stamps), float(np.median(np.diff(stamps)))], strict=True))
    counts: dict[float, int] = {}
    for request in requests:
        counts[request.arrival_s] = counts.get(request.arrival_s, 0) + 1
    spread = [
        replace(request, arrival_s=request.arrival_s + float(rng.random()) * float(widths[request.arrival_s]))
        if counts[request.arrival_s] > 1
        else request
        for request in requests
    ]
    return sorted(spread, key=lambda request: request.arrival_s)


def with_arrivals(requests: Sequence[TraceRequest], arrivals: ArrivalProcess, rng: np.random.Generator) -> Requests:
    """Return the same requests in the same order, at times drawn from `arrivals`."""
    times = arrivals.times(rng, len(requests))
    return [replace(request, arrival_s=float(time)) for request, time in zip(requests, times, strict=True)]


def start_sessions(requests: Sequence[TraceRequest], sessions_per_s: float, rng: np.random.Generator) -> Requests:
    """Place the sessions of a trace without a common clock: they start, in order of appearance, as a Poisson process.

    Inside a session times are as recorded (open loop: a request does not wait for the answer before it).
    """
    names = list(dict.fromkeys(request.session for request in requests))
    starts = dict(zip(names, PoissonArrivals(sessions_per_s).times(rng, len(names)), strict=True))
    return rebase(
        replace(request, arrival_s=request.arrival_s + float(starts[request.session])) for request in requests
    )


def in_namespace(trace: RequestTrace, namespace: int) -> RequestTrace:
    """Return a trace whose texts share nothing with those of other namespaces."""
    return replace(
        trace,
        requests=tuple(
            request if request.text is None else replace(request, text=replace(request.text, namespace=namespace))
            for request in trace.requests
        ),
    )


def close_sessions(
    requests: Sequence[TraceRequest],
    starts: ArrivalProcess,
    rng: np.random.Generator,
    *,
    count: int | None = None,
    turns: int | None = None,
    think: float = 1.0,
    max_think_s: float | None = None,
) -> Requests:
    """Return the first `count` sessions of a trace, the first `turns` requests of each, as closed loops.

    A session starts at a time of `starts`, each further thread of it as long after as in the trace. All other requests
    come after the answer before theirs (`waits`), `think` times the trace's think time later. Without a think time in
    the trace it is the time between the two requests. What was cached is left to the run."""
    by_session: dict[str | None, Requests] = {}
    for request in requests:
        by_session.setdefault(request.session, []).append(request)
    chosen = [mine[:turns] for mine in list(by_session.values())[:count]]
    closed: Requests = []
    for start_s, mine in zip(starts.times(rng, len(chosen)), chosen, strict=True):
        before: dict[str, TraceRequest] = {}
        for request in mine:
            last = before.get(request.thread)
            before[request.thread] = request
            if last is None:
                arrival_s, think_s = float(start_s) + request.arrival_s - mine[0].arrival_s, None
            else:
                waited_s = request.think_s if request.think_s is not None else request.arrival_s - last.arrival_s
                arrival_s = float(start_s) + request.arrival_s - mine[0].arrival_s
                think_s = min(think * waited_s, float("inf") if max_think_s is None else max_think_s)
            closed.append(
                replace(request, arrival_s=arrival_s, think_s=think_s, waits=last is not None, cached_tokens=0)
            )
    return sorted(closed, key=lambda request: request.arrival_s)


def close_loop(requests: Sequence[TraceRequest], users: int) -> Requests:
    """Return the requests as a closed loop: the first one of each user at time 0, every other one when an answer has
    come, in their order."""
    first = [replace(each, arrival_s=0.0) for each in requests[:users]]
    rest = [replace(each, arrival_s=0.0, think_s=0.0, waits=True) for each in requests[users:]]
    return [replace(each, session=None, thread="") for each in (*first, *rest)]


def classify(requests: Iterable[TraceRequest], long_threshold: int) -> Requests:
    """Set the class of requests without one: `long` (prompt above the threshold) or `short`."""
    return [
        request
        if request.klass
        else replace(request, klass="long" if request.prompt_tokens > long_threshold else "short")
        for request in requests
    ]


# Long prompts for traces that have none: PecSched §6.2 replaces the longest ones by 100K to 500K tokens.
#
# Public traces of chat services end near 10K. Both rules keep arrivals and outputs, class what they lengthen `long` and
# the rest `short`, and are named in every result that rests on them.

LOW, HIGH = 100_000, 500_000
LINEAR_FROM = 4096


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
