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

MAX_UNSCHEDULABLE = 2
"""How many requests are tried in vain for what is left of the time: a bound on a decision."""


class PackCandidate(msgspec.Struct, frozen=True, gc=False):
    """A prefill as the packer sees it, most urgent first."""

    request: str
    past: int
    """Cached tokens that its attention reads; of a request in several groups, those of its largest shard."""
    remaining: int
    """Tokens to compute; of a request in several groups, those that still fit its last shard."""
    is_long: bool
    slack: float
    """The relative slack rho, with its sign."""
    stalled: int = 0
    """Iterations since it last advanced, or, before it has begun, since any prefill did."""
    completes: bool = True
    """Whether `remaining` ends the prompt."""
    reserved_s: float = 0.0
    """What busier groups leave less of the time."""
    exchange_s_per_row: float = 0.0
    """Seconds that each row costs to exchange with other groups."""


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
    filling = _Filling(load, shorts_wait, rules, chunking, latency)
    for candidate in candidates:
        if filling.full and (filling.bounded or filling.quotas):
            break
        if candidate.is_long and filling.has_long:
            continue
        tokens, attention_s = filling.size(candidate)
        if tokens <= 0:
            if filling.exhausted(candidate):
                break
        elif admit(candidate.request):
            filling.add(candidate, tokens, attention_s)
            if filling.bounded and filling.full:
                break  # before the next candidate is looked at
    filling.use_yielded_time(admit)
    return filling.quotas, filling.load


class _Filling:
    """One iteration while it is filled."""

    __slots__ = (
        "bounded",
        "chunking",
        "first",
        "has_long",
        "latency",
        "load",
        "max_tokens",
        "quotas",
        "rules",
        "shorts_wait",
        "skipped",
        "unschedulable",
    )

    def __init__(
        self, load: BatchLoad, shorts_wait: bool, rules: PackRules, chunking: ChunkingStrategy, latency: LatencyModel
    ) -> None:
        self.load = load
        self.shorts_wait = shorts_wait
        self.rules = rules
        self.chunking = chunking
        self.latency = latency
        self.quotas: list[ChunkQuota] = []
        self.has_long = False
        self.first = True  # no candidate has been passed over for want of time
        self.unschedulable = 0
        self.skipped: PackCandidate | None = None  # the first that found no time
        self.max_tokens = rules.max_tokens if chunking.most is None else min(rules.max_tokens, chunking.most)
        self.bounded = chunking.timed or chunking.most is not None  # `whole` may exceed the tokens by one prompt

    @property
    def full(self) -> bool:
        return self.load.tokens >= self.max_tokens

    def size(self, candidate: PackCandidate) -> tuple[int, float]:
        """(tokens, seconds of their attention) for a candidate beside what is in the iteration; no tokens: skip it."""
        budget_s = self._budget_s(candidate)
        model = self.latency
        if candidate.exchange_s_per_row or candidate.reserved_s:
            model = WithExchange(model, candidate.exchange_s_per_row)
        room = max(self.max_tokens - self.load.tokens, 0)
        ask = PrefillDemand(candidate.past, candidate.remaining, room)
        if not self.chunking.timed:
            return self.chunking.quota(ask, self.load, budget_s, model)
        floor = min(max(self.rules.min_chunk, 1), candidate.remaining, max(room, 1))  # smallest chunk worth a place
        # Where the smallest exceeds the time no larger one is looked for: measured time may fall a little where a
        # chunk grows, which is not worth a search.
        if not self.first and _exceeds(model, self.load, candidate.past, floor, budget_s):
            tokens, attention_s = 0, 0.0
        else:
            tokens, attention_s = self.chunking.quota(ask, self.load, budget_s, model)
        if self.rules.stretch and tokens < candidate.remaining <= room and not candidate.is_long:
            tokens, attention_s = self._stretch(candidate, budget_s, tokens, attention_s)
        if tokens < floor:
            tokens, attention_s = self._progress(candidate, model, floor, tokens, attention_s)
        return tokens, attention_s

    def _yields(self, candidate: PackCandidate) -> bool:
        """Whether a long request leaves time to the short ones that wait."""
        return self.shorts_wait and self.rules.shares_space and candidate.is_long

    def _budget_s(self, candidate: PackCandidate) -> float:
        """Longest iteration that a candidate may make: a long one yields the share that its slack allows, and one in
        several groups keeps to the busiest of them."""
        rules = self.rules
        budget_s = rules.t_target_s
        if self._yields(candidate):
            budget_s *= 1.0 - min(rules.rho_max, max(rules.rho_min, candidate.slack))
        return budget_s - candidate.reserved_s

    def _stretch(self, candidate: PackCandidate, budget_s: float, tokens: int, attention_s: float) -> tuple[int, float]:
        """All of a short prompt, where that exceeds the time by a little only: else it would wait for an iteration."""
        past, rest = candidate.past, candidate.remaining
        longer_s = budget_s * (1.0 + self.rules.stretch)
        if not candidate.completes or _exceeds(self.latency, self.load, past, rest, longer_s):
            return tokens, attention_s
        return rest, one_chunk_s(self.latency, past, rest)

    def _progress(
        self, candidate: PackCandidate, model: LatencyModel, floor: int, tokens: int, attention_s: float
    ) -> tuple[int, float]:
        """A chunk below the floor: raised to it where the most urgent request must advance, else dropped."""
        empty = is_empty(self.load)
        idle = empty and not self._yields(candidate)
        must = self.first and (idle or candidate.stalled >= self.rules.progress_every)
        if must and (self.rules.min_chunk or empty):  # paper mode too: else nothing would ever go on
            return floor, one_chunk_s(model, candidate.past, floor)
        if self.first and tokens:
            return tokens, attention_s
        self.skipped = self.skipped or candidate
        return 0, 0.0

    def exhausted(self, candidate: PackCandidate) -> bool:
        """Note a candidate that found no time, and tell whether no other needs to be tried."""
        if not self.chunking.timed:
            self.first = False
            return False
        if self.load.tokens and load_s(self.latency, self.load) >= self.rules.t_target_s:
            return True
        self.first = False
        # A candidate that had less time than others get says nothing about them.
        self.unschedulable += self._budget_s(candidate) == self.rules.t_target_s
        return self.unschedulable >= MAX_UNSCHEDULABLE

    def add(self, candidate: PackCandidate, tokens: int, attention_s: float) -> None:
        self.first = False
        self.quotas.append(ChunkQuota(candidate.request, tokens))
        self.load = self.load.with_chunk(tokens, attention_s, candidate.past)
        self.has_long = self.has_long or candidate.is_long

    def use_yielded_time(self, admit: Callable[[str], bool]) -> None:
        """Give the smallest chunk to the first that was skipped where nothing could use the time that it yielded: an
        iteration must not be empty."""
        skipped = self.skipped
        if skipped is None or self.quotas or not is_empty(self.load) or not admit(skipped.request):
            return
        tokens = min(max(self.rules.min_chunk, 1), skipped.remaining, self.max_tokens)
        self.add(skipped, tokens, one_chunk_s(self.latency, skipped.past, tokens))


def _exceeds(latency: LatencyModel, load: BatchLoad, past: int, tokens: int, budget_s: float) -> bool:
    """Whether a chunk of so many tokens makes the iteration longer than the budget."""
    return load_s(latency, load.with_chunk(tokens, one_chunk_s(latency, past, tokens), past)) > budget_s
