"""How many tokens each prefill gets in an iteration (Medha's Algorithms 1 and 2): decodes first, then chunks in order
of urgency.

Stateless: views and aggregates in, quotas out, so that the scheduler, the simulator and a plug-in for another engine
call the same function. Departures (DESIGN.md §4): one pass over the order, nothing is requeued; the *total* predicted
time is held to the budget; a minimum chunk and a bound on how long the first in line may be passed over; requests
yield only while a smaller one waits, and at least rho_min, long ones to short ones and those of several iterations to
those of one; an iteration is stretched a little where that completes a short prompt that does not yield, which would
otherwise wait for a second one, and further where a long prefix of it is cached and nothing decodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from headway.perf.latency.base import BatchLoad, LatencyModel, beside_prompts, decodes_s, load_s, one_chunk_s
from headway.perf.latency.shard_exchange import WithExchange
from headway.policy.iteration.chunking_strategies import ChunkingStrategy, PrefillDemand, is_empty
from headway.policy.iteration.config import SchedulerConfig
from headway.policy.iteration.efficient_chunks import LEAST_AIM_S, LONGEST_AIM_S
from headway.policy.iteration.prefill import LONG, SEVERAL_ITERATIONS
from headway.policy.iteration.space_sharing import time_of_larger_s

MAX_UNSCHEDULABLE = 2
"""How many requests are tried in vain for what is left of the time: a bound on a decision."""

BACKGROUND_GAIN = 2.0
"""An iteration of a background request may take so many times what one of its tokens takes."""


class PackCandidate(msgspec.Struct, frozen=True, gc=False):
    """A waiting prefill as input of `pack`; candidates come most urgent first. Tokens and seconds."""

    request: str
    past: int
    """Cached tokens that the chunk attends; for a request in several groups, the tokens of its largest shard."""
    remaining: int
    """Tokens to compute; for a request in several groups, those that still fit its last shard."""
    size: int
    """`ONE_ITERATION`, `SEVERAL_ITERATIONS` or `LONG`."""
    slack: float
    """The relative slack rho, with its sign."""
    stalled: int = 0
    """Iterations since it last advanced, or, before it has begun, since any prefill did."""
    completes: bool = True
    """Whether `remaining` ends the prompt."""
    reserved_s: float = 0.0
    """Seconds of the budget that the busiest group holding its shards has already used beyond the owner group."""
    exchange_s_per_row: float = 0.0
    """Seconds that each row costs to exchange with other groups."""
    yields: bool = True
    """Whether it leaves time to smaller ones that wait: not where all of them have a lower priority."""
    longest_s: float = float("inf")
    """Longest iteration, seconds, with tokens of this request: those of a background request are short."""
    alone: bool = False
    """Whether it gets tokens only where nothing else does: arrivals interrupt such an iteration."""
    interrupted: int = 0
    """Tokens of its chunk that was interrupted, if there is one: of the same size it goes on where it was."""


@dataclass
class PackRules:
    """Settings of `SchedulerConfig` that `pack` reads; the config explains each field."""

    t_target_s: float
    """Longest iteration, seconds (`IterationPolicy.budget_s`): it changes from one to the next."""
    max_tokens: int
    """Rows of one iteration, decodes included."""
    min_chunk: int
    progress_every: int
    rho_min: float
    rho_max: float
    stretch: float = 0.0
    cached_rest_s: float = 0.0
    """Longest iteration, seconds, without decodes, that completes a short prompt behind a long cached prefix."""
    cached_from: int = 0
    """Tokens from which on a short prompt's prefix is a long cached one."""
    slack_margin: float = float("inf")
    """No candidate has a slack below that of an earlier one by more; infinite: they are not in order of slack. It grows
    where slacks are computed anew and the order is kept."""
    even_rows: bool = False
    """Whether cut prompts end where the rows of the iteration are one of the sizes of `even_rows`."""
    shared_s: float = float("inf")
    """Longest iteration, seconds, of which a request gets a share while smaller ones wait."""


def rules_of(config: SchedulerConfig, t_target_s: float) -> PackRules:
    """Return the rules of a configuration for iterations of at most `t_target_s` seconds."""
    return PackRules(
        t_target_s=t_target_s,
        max_tokens=config.max_num_batched_tokens,
        min_chunk=config.min_chunk,
        progress_every=config.progress_every,
        rho_min=config.rho_min,
        rho_max=config.rho_max,
        stretch=config.stretch,
        # Configured times bound iterations as they stand; with stages a batch behind may hold decodes.
        cached_rest_s=LONGEST_AIM_S
        if config.t_target_s is None and config.newcomer_wait_s is None and config.stages == 1
        else 0.0,
        cached_from=config.long_tokens,
        even_rows=config.even_rows,
        # The order of LARS but for the place that an active long request keeps, and for rounding.
        slack_margin=config.quantum + 1e-3 if config.policy == "lars" and not config.relegation else float("inf"),
        # A short that waits should not wait for what the machine finds efficient for a long one, nor for all of a gap
        # that was chosen for long prompts (Algorithm 2: of all of it).
        shared_s=min(config.t_target_s or LEAST_AIM_S, LONGEST_AIM_S if config.useful_share < 1 else float("inf")),
    )


class ChunkAllocation(msgspec.Struct, frozen=True, gc=False):
    """Tokens of one prefill in this iteration."""

    request: str
    tokens: int


def pack(
    load: BatchLoad,
    candidates: Iterable[PackCandidate],
    yields_from: int,
    rules: PackRules,
    chunking: ChunkingStrategy,
    latency: LatencyModel,
    admit: Callable[[str], bool] = lambda _: True,
    pass_over: Callable[[bool], None] = lambda _: None,
) -> tuple[list[ChunkAllocation], BatchLoad]:
    """Return chunk quotas in order of urgency, and the load of these chunks together with `load`, the decodes.

    `yields_from`: the smallest size of requests that leave time to smaller ones, `IterationPolicy.yields_from`.
    `admit(request)` reserves KV and is called right before a request gets its first tokens; False skips the request.
    `pass_over(whether)` is called as the iteration fills: whether candidates that yield find no time in it, so that
    they need not be offered.
    Candidates are consumed lazily: iteration stops when nothing more can fit. At most one long request gets tokens.
    Called by `IterationPolicy.pick`, once an iteration and group.
    """
    filling = _Filling(load, yields_from, rules, chunking, latency)
    for candidate in candidates:
        # `whole` may exceed the token limit by one prompt: its first candidate is sized even where decodes fill the
        # limit.
        if filling.room <= 0 and (filling.bounded or filling.quotas):
            break
        # The more urgent long request has this iteration; others wait, shorts behind them do not.
        if candidate.size == LONG and filling.has_long:
            continue
        tokens, attention_s = filling.size(candidate)
        if tokens <= 0:
            if filling.exhausted():
                break
            pass_over(filling.full_for_yielding(candidate.slack))
        # Reserve KV last: a candidate that gets no time must not hold blocks.
        elif admit(candidate.request):
            filling.add(candidate, tokens, attention_s)
            # Stop before the generator is advanced: finding the next candidate may cost a KV look-up.
            if filling.bounded and filling.room <= 0:
                break
            pass_over(filling.full_for_yielding(candidate.slack))
    if filling.skipped is not None:
        filling.use_yielded_time(admit)
    return filling.quotas, filling.load


def even_rows(rows: int) -> int:
    """Return the largest number, up to `rows`, whose binary digits but the first five are 0: 16 sizes an octave.

    Where a library prepares a product of matrices for each number of rows that it meets (oneDNN, for vLLM on CPUs:
    20 ms a step at 700 rows in bf16), iterations of arbitrary sizes pay that again and again."""
    return rows & ~((1 << max(0, rows.bit_length() - 5)) - 1)


def is_bounded(chunking: ChunkingStrategy) -> bool:
    """Whether the limit on an iteration's tokens always holds: `whole` may exceed it by one prompt."""
    return chunking.timed or chunking.most is not None


class _Filling:
    """Running state of one `pack` call."""

    __slots__ = (
        "_decode_s",
        "_full_time",
        "_load_s",
        "_model",
        "_unshared_s",
        "bounded",
        "chunking",
        "first",
        "has_long",
        "latency",
        "load",
        "max_tokens",
        "quotas",
        "room",
        "rules",
        "skipped",
        "unschedulable",
        "yields_from",
    )

    def __init__(
        self, load: BatchLoad, yields_from: int, rules: PackRules, chunking: ChunkingStrategy, latency: LatencyModel
    ) -> None:
        self.load = load
        # Seconds of the decodes, of which prompts of several iterations get no share; 0: none of those yields.
        self._unshared_s = load_s(latency, load) if yields_from == SEVERAL_ITERATIONS else 0.0
        self.yields_from = yields_from
        self.rules = rules
        self.chunking = chunking
        self.latency = latency
        self.quotas: list[ChunkAllocation] = []
        self.has_long = False
        # True until a candidate has got tokens or has found no time: the most urgent one has privileges.
        self.first = True
        # Candidates with the full budget that found no time, up to MAX_UNSCHEDULABLE.
        self.unschedulable = 0
        # The most urgent candidate that found no time.
        self.skipped: PackCandidate | None = None
        self.max_tokens = rules.max_tokens if chunking.most is None else min(rules.max_tokens, chunking.most)
        # Tokens that the iteration still takes; negative where decodes, or one prompt under `whole`, exceed the limit.
        self.room = self.max_tokens - load.tokens
        self.bounded = is_bounded(chunking)
        # Seconds of the decodes, the same whatever is added; None: the model's terms depend on each other, or the
        # time does not matter.
        separable = chunking.timed and not latency.coupled
        self._decode_s = decodes_s(latency, load) if separable else None
        # Predicted seconds of `load`; None: not known yet.
        self._load_s: float | None = None
        # The latency model of the next chunk; None: of one beside the chunks that were added.
        self._model: LatencyModel | None = beside_prompts(latency, load)
        # Whether the last candidate that was sized had the full budget.
        self._full_time = True

    def size(self, candidate: PackCandidate) -> tuple[int, float]:
        """Return (tokens, seconds of their attention) for a candidate on top of `load`; 0 tokens: skip it."""
        model, past, remaining = self._model, candidate.past, candidate.remaining
        if model is None:
            model = self._model = beside_prompts(self.latency, self.load)
        if candidate.exchange_s_per_row or candidate.reserved_s:
            model = WithExchange(model, candidate.exchange_s_per_row)
        room, rules = max(self.room, 0), self.rules
        if candidate.alone and not is_empty(self.load):
            return 0, 0.0
        if candidate.interrupted:
            return candidate.interrupted, one_chunk_s(model, past, candidate.interrupted)
        if not self.chunking.timed:
            return self.chunking.quota(PrefillDemand(past, remaining, room), self.load, rules.t_target_s, model)
        budget_s = self._budget_s(candidate)
        self._full_time = budget_s == rules.t_target_s
        # Smallest chunk worth a place; a prompt's last tokens may be fewer than min_chunk.
        floor = min(min(rules.min_chunk or 1, remaining), room or 1)
        # If the smallest chunk exceeds the time, search no larger one: measured tables are not monotonic, and the
        # little time that a larger chunk may save is not worth a search.
        if not self.first and self._exceeds(model, past, floor, budget_s):
            tokens, attention_s = 0, 0.0
        else:
            demand = PrefillDemand(past, remaining, room, self._decode_s)
            tokens, attention_s = self.chunking.quota(demand, self.load, budget_s, model)
        # Stretch only what time cut: a prompt that exceeds the token limit cannot complete anyway.
        stretches = rules.stretch and candidate.completes and candidate.size < LONG and not self._yields(candidate)
        if stretches and tokens < remaining <= room:
            tokens, attention_s = self._stretch(candidate, budget_s, tokens, attention_s)
        if tokens < floor:
            tokens, attention_s = self._progress(candidate, model, floor, tokens, attention_s)
        elif rules.even_rows and tokens < remaining:
            fewer = even_rows(self.load.tokens + tokens) - self.load.tokens
            # In measured tables fewer rows may take longer.
            if floor <= fewer < tokens and not self._exceeds(model, past, fewer, budget_s):
                return fewer, one_chunk_s(model, past, fewer)
            # A few tokens of a further prompt are not worth an iteration of another size.
            if fewer < floor and self.quotas:
                return 0, 0.0
        return tokens, attention_s

    def _budget_s(self, candidate: PackCandidate) -> float:
        """Return the longest iteration, in seconds, that adding a candidate may make.

        One that yields leaves the share that its slack allows; one in several groups keeps to the busiest of them."""
        rules = self.rules
        budget_s = rules.t_target_s
        if self._yields(candidate):
            budget_s = self._time_of_larger_s(candidate.size, candidate.slack)
        budget_s -= candidate.reserved_s
        if candidate.longest_s < budget_s:
            # a prompt for which a client waits has its iterations to itself: after a long context one token is long
            if self.quotas:
                return 0.0
            # each pass reads the whole context: below this most of the time would go there
            alone_s = self.latency.rows_s(1) + one_chunk_s(self.latency, candidate.past, 1)
            budget_s = min(budget_s, max(candidate.longest_s, BACKGROUND_GAIN * alone_s))
        return budget_s

    def _time_of_larger_s(self, size: int, slack: float) -> float:
        rules = self.rules
        # Algorithm 2 shares the whole iteration. Of what decodes leave, a prompt of several iterations goes on however
        # long they take and however many small ones come.
        unshared_s = 0.0 if size == LONG else min(self._unshared_s, rules.t_target_s)
        return time_of_larger_s(rules.t_target_s, rules.shared_s, slack, rules.rho_min, rules.rho_max, unshared_s)

    def full_for_yielding(self, slack: float) -> bool:
        """Whether each further candidate that yields, behind one of this slack, would be refused.

        The least that a token costs exceeds the most time that any of them may have. Others may yet find time."""
        if self.first or self.yields_from > LONG or self._decode_s is None:
            return False
        # With unshared time none has less than a long one has.
        most_s = self._time_of_larger_s(self.yields_from, slack - self.rules.slack_margin)
        # Where the time is used up, or none is yielded, a refusal may end the search (`exhausted`).
        if not self._predicted_s() < self.rules.t_target_s > most_s * (1.0 + 1e-9):
            return False
        # In the order of `_exceeds`, so that rounding cannot make the bound larger than a candidate's time.
        return self.latency.least_rows_s(self.load.tokens + 1) + self._decode_s + self.load.chunk_s > most_s

    def _yields(self, candidate: PackCandidate) -> bool:
        return candidate.size >= self.yields_from and candidate.yields

    def _stretch(self, candidate: PackCandidate, budget_s: float, tokens: int, attention_s: float) -> tuple[int, float]:
        """Return the whole rest of a short prompt if it exceeds the budget by at most the share `stretch`.

        Else return the given size. A prompt that is cut a few tokens before its end waits a whole iteration for its
        first token."""
        past, rest, model = candidate.past, candidate.remaining, self._model
        assert model is not None
        longer_s = budget_s * (1.0 + self.rules.stretch)
        # A short prompt with so much before its chunk is one whose prefix was cached.
        if past >= self.rules.cached_from and is_empty(self.load):
            longer_s = max(longer_s, self.rules.cached_rest_s)
        if self._exceeds(model, past, rest, longer_s):
            return tokens, attention_s
        return rest, one_chunk_s(model, past, rest)

    def _progress(
        self, candidate: PackCandidate, model: LatencyModel, floor: int, tokens: int, attention_s: float
    ) -> tuple[int, float]:
        """Raise a chunk below the floor to the floor if the most urgent request must advance, else drop it."""
        empty = is_empty(self.load)
        # In an empty iteration an oversized chunk delays no decode; but shorts that wait may yet use the time.
        idle = empty and not self._yields(candidate)
        must = self.first and (idle or candidate.stalled >= self.rules.progress_every)
        # min_chunk 0 (paper mode) raises a chunk in an empty iteration only: else nothing would ever advance.
        if must and (self.rules.min_chunk or empty):
            return floor, one_chunk_s(model, candidate.past, floor)
        # The most urgent request takes what fits, even below the floor; it does not wait for a larger gap.
        if self.first and tokens:
            return tokens, attention_s
        self.skipped = self.skipped or candidate
        return 0, 0.0

    def exhausted(self) -> bool:
        """Count the candidate that was sized last, and found no time. Return whether the search can stop."""
        if not self.chunking.timed:
            self.first = False
            return False
        # The time is used up: every later chunk costs more than nothing.
        if self.load.tokens and self._predicted_s() >= self.rules.t_target_s:
            return True
        self.first = False
        # A candidate with a reduced budget (yielding, or in a busy group) says nothing about candidates with the full
        # one.
        self.unschedulable += self._full_time
        return self.unschedulable >= MAX_UNSCHEDULABLE

    def _predicted_s(self) -> float:
        """Return the predicted seconds of `load`."""
        if self._load_s is None:
            if self._decode_s is None:
                self._load_s = load_s(self.latency, self.load)
            else:
                self._load_s = self.latency.rows_s(self.load.tokens) + self._decode_s + self.load.chunk_s
        return self._load_s

    def add(self, candidate: PackCandidate, tokens: int, attention_s: float) -> None:
        """Add a chunk to the iteration."""
        self.first = False
        self.quotas.append(ChunkAllocation(candidate.request, tokens))
        self.load = self.load.with_chunk(tokens, attention_s, candidate.past)
        self.room -= tokens
        self._model = self._load_s = None
        self.has_long = self.has_long or candidate.size == LONG

    def use_yielded_time(self, admit: Callable[[str], bool]) -> None:
        """Give the smallest chunk to the first skipped candidate if the iteration would otherwise be empty.

        A long request yields time to shorts; where no short could use it (no KV, for instance), the instance would
        idle although work waits."""
        skipped = self.skipped
        if skipped is None or self.quotas or not is_empty(self.load) or not admit(skipped.request):
            return
        tokens = min(max(self.rules.min_chunk, 1), skipped.remaining, self.max_tokens)
        self.add(skipped, tokens, one_chunk_s(self.latency, skipped.past, tokens))

    def _exceeds(self, model: LatencyModel, past: int, tokens: int, budget_s: float) -> bool:
        """Whether a chunk of so many tokens makes the iteration longer than the budget, by a model of its own costs."""
        load, attention_s = self.load, model.attention_s(past, tokens)
        if self._decode_s is None:
            return load_s(model, load.with_chunk(tokens, attention_s, past)) > budget_s
        # As `load_s`, without making a load.
        return model.rows_s(load.tokens + tokens) + self._decode_s + (load.chunk_s + attention_s) > budget_s
