"""Medha's Algorithms 1 and 2: fill an iteration with decodes, then with prefill chunks in order of urgency.

Stateless: views and aggregates in, quotas out, so that the scheduler, the simulator and a plug-in for another engine
call the same function. Departures (DESIGN.md §4): one pass over the order, nothing is requeued; the *total* predicted
time is held to the budget; a minimum chunk and a bound on how long the first in line may be passed over; a long
request yields only while a short one waits, and at least rho_min; an iteration is stretched a little where that
completes a short prompt, which would otherwise wait for a second one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from headway.perf.latency.base import BatchLoad, LatencyModel, load_s, one_chunk_s
from headway.perf.latency.shard_exchange import WithExchange
from headway.policy.iteration.chunking import ChunkingStrategy, PrefillDemand, is_empty
from headway.policy.iteration.config import SchedulerConfig

MISSES = 2
"""So many requests that found no room in what is left of the time, and nobody else is tried: a bound on a decision."""


class PackCandidate(msgspec.Struct, frozen=True, gc=False):
    """A prefill as the packer sees it, most urgent first. `slack` is the relative slack rho, with its sign.

    stalled: iterations since it last advanced, or, before it has begun, since any prefill did. Of a request whose KV
    lies in several groups: `past` and `remaining` are those of its largest and of its last shard, which `completes` the
    prompt or does not; `withheld_s` is what busier groups leave less of the time, and `row_s` what a row's exchange is.
    """

    request: str
    past: int
    remaining: int
    is_long: bool
    slack: float
    stalled: int = 0
    completes: bool = True
    withheld_s: float = 0.0
    row_s: float = 0.0


class PackRules(msgspec.Struct, frozen=True, gc=False):
    """What of `SchedulerConfig` the packer needs, and t_target as tightened by the SLOs of running requests."""

    t_target_s: float
    max_tokens: int
    min_chunk: int
    progress_every: int
    rho_min: float
    rho_max: float
    shares_space: bool
    stretch: float = 0.0


def rules_of(config: SchedulerConfig) -> PackRules:
    """As an instance has them while nobody was promised less than its aim."""
    return PackRules(
        t_target_s=config.t_target_s,
        max_tokens=config.max_num_batched_tokens,
        min_chunk=config.min_chunk,
        progress_every=config.progress_every,
        rho_min=config.rho_min,
        rho_max=config.rho_max,
        shares_space=config.shares_space,
        stretch=config.stretch,
    )


class ChunkQuota(msgspec.Struct, frozen=True, gc=False):
    request: str
    tokens: int


def pack(
    load: BatchLoad,
    candidates: Iterable[PackCandidate],
    shorts_wait: bool,
    rules: PackRules,
    chunking: ChunkingStrategy,
    latency: LatencyModel,
    admit: Callable[[str], bool] = lambda _: True,
) -> tuple[list[ChunkQuota], BatchLoad]:
    """Quotas in order of urgency, and the load that they make together with the decodes in `load`.

    `admit(request)` is asked right before a request is given its first tokens; False skips it (no KV). Candidates are
    consumed lazily: iteration stops when nothing more can fit. At most one long request gets tokens.
    """
    quotas: list[ChunkQuota] = []
    has_long = False
    head = True
    misses = 0
    passed: PackCandidate | None = None
    most = rules.max_tokens if chunking.most is None else min(rules.max_tokens, chunking.most)
    bounded = chunking.timed or chunking.most is not None
    for candidate in candidates:
        room = most - load.tokens
        if room <= 0 and (bounded or quotas):
            break
        if candidate.is_long and has_long:
            continue
        budget_s = rules.t_target_s
        yields = rules.shares_space and candidate.is_long and shorts_wait
        if yields:
            budget_s *= 1.0 - min(rules.rho_max, max(rules.rho_min, candidate.slack))
        model = latency
        if candidate.withheld_s or candidate.row_s:
            budget_s -= candidate.withheld_s
            model = WithExchange(latency, candidate.row_s)
        ask = PrefillDemand(candidate.past, candidate.remaining, max(room, 0))
        floor = min(max(rules.min_chunk, 1), candidate.remaining, max(room, 1))
        if chunking.timed and not head and _full(model, load, candidate.past, floor, budget_s):
            tokens, attention_s = 0, 0.0
        else:
            tokens, attention_s = chunking.quota(ask, load, budget_s, model)
        stretches = rules.stretch and chunking.timed and candidate.completes and not candidate.is_long
        if stretches and tokens < candidate.remaining <= room:
            longer_s = budget_s * (1.0 + rules.stretch)
            if not _full(latency, load, candidate.past, candidate.remaining, longer_s):
                tokens, attention_s = candidate.remaining, one_chunk_s(latency, candidate.past, candidate.remaining)
        if tokens < floor and chunking.timed:
            idle = is_empty(load) and not yields
            must = head and (idle or candidate.stalled >= rules.progress_every)
            if must and (rules.min_chunk or is_empty(load)):  # paper mode too: else nothing would ever go on
                tokens, attention_s = floor, one_chunk_s(model, candidate.past, floor)
            elif not head or not tokens:
                passed = passed or candidate
                tokens = 0
        if tokens <= 0:
            if chunking.timed and load.tokens and load_s(latency, load) >= rules.t_target_s:
                break
            head = False
            misses += budget_s == rules.t_target_s
            if misses >= MISSES and chunking.timed:
                break
            continue
        if not admit(candidate.request):
            continue
        head = False
        quotas.append(ChunkQuota(candidate.request, tokens))
        load = load.with_chunk(tokens, attention_s, candidate.past)
        has_long = has_long or candidate.is_long
        if bounded and load.tokens >= most:
            break
    if passed is not None and not quotas and is_empty(load) and admit(passed.request):
        # Nobody could use the time that was yielded: the iteration must not be empty.
        tokens = min(max(rules.min_chunk, 1), passed.remaining, most)
        quotas.append(ChunkQuota(passed.request, tokens))
        load = load.with_chunk(tokens, one_chunk_s(latency, passed.past, tokens), passed.past)
    return quotas, load


def _full(latency: LatencyModel, load: BatchLoad, past: int, tokens: int, budget_s: float) -> bool:
    """Whether a chunk of so many tokens exceeds the budget. Where the least chunk does, nobody looks for a larger one.
    (Measured time may fall a little where a chunk grows: not worth a search.)"""
    return load_s(latency, load.with_chunk(tokens, one_chunk_s(latency, past, tokens), past)) > budget_s
