"""Fill one iteration with chunks of prefills, in the order in which they are offered, up to its time and its tokens."""

from __future__ import annotations

from typing import Final

import msgspec

from headway.perf.latency.base import BatchLoad, LatencyModel, beside_prompts, decodes_s, load_s, solve_tokens
from headway.perf.latency.groups import WithExchange
from headway.policy.iteration.budget import EfficientChunks
from headway.policy.iteration.config import ChunkingRule, SchedulerConfig

MAX_UNSCHEDULABLE: Final = 2
"""How many requests are tried in vain for what is left of the time: a bound on a decision."""
PROGRESS_EVERY: Final = 8
"""The first in order advances at least every so many iterations, however little time its targets leave."""


class ChunkRequest(msgspec.Struct, frozen=True, gc=False):
    """A prefill that is offered to an iteration. Tokens and seconds."""

    past: int
    """Cached tokens that the chunk attends; for a request in several groups, the tokens of its largest shard."""
    remaining: int
    """Tokens to compute; for a request in several groups, those that still fit its last shard."""
    budget_s: float
    """Longest iteration that its chunk may make."""
    stalled: bool = False
    """Whether it has not advanced for `PROGRESS_EVERY` iterations."""
    efficient: bool = False
    """Whether a chunk that is cut must be an efficient one (`EfficientChunks.least_tokens`)."""
    idle: bool = True
    """Whether an iteration that is empty without it should have a chunk of it, whatever its budget."""
    longest_s: float = 0.0
    """Longest iteration that its chunk may make where that completes the prompt."""
    exchange_s_per_row: float = 0.0
    """Seconds that each row costs to exchange with other KV groups."""


def even_rows(rows: int) -> int:
    """Return the largest number, up to `rows`, whose binary digits but the first five are 0: 16 sizes an octave.

    Where a library prepares a product of matrices for each number of rows that it meets (oneDNN, for vLLM on CPUs:
    20 ms a step at 700 rows in bf16), iterations of arbitrary sizes pay that again and again."""
    return rows & ~((1 << max(0, rows.bit_length() - 5)) - 1)


def is_empty(load: BatchLoad) -> bool:
    """Whether an iteration computes nothing yet: no rows, and no attention for other groups."""
    return not (load.tokens or load.decodes or load.chunk_s)


class IterationFill:
    """One iteration while it is filled."""

    __slots__ = (
        "_chunking",
        "_decode_s",
        "_efficient",
        "_even",
        "_latency",
        "_limited",
        "_literal",
        "_load_s",
        "_min_chunk",
        "_model",
        "_unschedulable",
        "budget_s",
        "completing",
        "first",
        "load",
        "quotas",
        "room",
    )

    def __init__(
        self,
        load: BatchLoad,
        budget_s: float,
        config: SchedulerConfig,
        chunking: ChunkingRule,
        latency: LatencyModel,
        efficient: EfficientChunks,
        even: bool,
    ) -> None:
        """`load`: of the decodes. `even`: whether cut prompts end where the rows of the iteration are `even_rows`."""
        self.load = load
        self.budget_s = budget_s
        self.quotas: dict[str, int] = {}
        # True until a request has got tokens or has found no time: the most urgent one has privileges.
        self.first = True
        # Prompts that it completes.
        self.completing = 0
        # Tokens that the iteration still takes; negative where decodes, or one prompt under `whole`, exceed the limit.
        max_tokens = config.max_num_batched_tokens
        self.room = (max_tokens if chunking.most is None else min(max_tokens, chunking.most)) - load.tokens
        # Whether the limit on tokens always holds: `whole` may exceed it by one prompt.
        self._limited = chunking.timed or chunking.most is not None
        self._min_chunk = config.min_chunk
        self._literal = config.literal
        self._chunking = chunking
        self._latency = latency
        self._efficient = efficient
        self._even = even
        # Seconds of the decodes, the same whatever is added; None: the model's terms depend on each other, or the
        # time does not matter.
        self._decode_s = decodes_s(latency, load) if chunking.timed and not latency.coupled else None
        # Predicted seconds of `load`; None: not known yet.
        self._load_s: float | None = None
        # The latency model of the next chunk; None: of one beside the chunks that were added.
        self._model: LatencyModel | None = beside_prompts(latency, load)
        # Requests that found no time in all of what is left, up to MAX_UNSCHEDULABLE.
        self._unschedulable = 0

    @property
    def full(self) -> bool:
        """Whether no further request need be offered."""
        return (self.room <= 0 and (self._limited or bool(self.quotas))) or self._unschedulable >= MAX_UNSCHEDULABLE

    def size(self, ask: ChunkRequest) -> tuple[int, float]:
        """Return (tokens, seconds of their attention) of a request on top of `load`; 0 tokens: it gets none."""
        model, past, remaining = self._model, ask.past, ask.remaining
        if model is None:
            model = self._model = beside_prompts(self._latency, self.load)
        if ask.exchange_s_per_row:
            model = WithExchange(model, ask.exchange_s_per_row)
        if not self._chunking.timed:
            tokens = self._untimed(remaining)
            return tokens, model.attention_s(past, tokens) if tokens else 0.0
        room = max(self.room, 0)
        # Smallest chunk worth a place; a prompt's last tokens may be fewer.
        least = self._efficient.least_tokens(past) if ask.efficient else self._min_chunk
        floor = min(least or 1, remaining, room or 1)
        # If the smallest chunk exceeds the time, search no larger one: measured tables are not monotonic, and the
        # little time that a larger chunk may save is not worth a search.
        if not self.first and self._exceeds(model, past, floor, ask.budget_s):
            tokens, attention_s = 0, 0.0
        else:
            tokens, attention_s = self._within(model, past, min(remaining, room), ask.budget_s)
        if tokens < remaining <= room and ask.longest_s and not self._exceeds(model, past, remaining, ask.longest_s):
            return remaining, model.attention_s(past, remaining)
        if tokens < floor:
            return self._below_floor(ask, model, floor, tokens, attention_s)
        if self._even and tokens < remaining:
            fewer = even_rows(self.load.tokens + tokens) - self.load.tokens
            # In measured tables fewer rows may take longer.
            if floor <= fewer < tokens and not self._exceeds(model, past, fewer, ask.budget_s):
                return fewer, model.attention_s(past, fewer)
        return tokens, attention_s

    def longer(self, ask: ChunkRequest, tokens: int) -> tuple[int, float]:
        """Return (tokens, seconds of their attention) of a chunk of twice so many tokens, where there are as many."""
        twice = max(min(2 * tokens, ask.remaining, self.room), tokens)
        return twice, (self._model or beside_prompts(self._latency, self.load)).attention_s(ask.past, twice)

    def add(self, request_id: str, tokens: int, attention_s: float, past: int) -> None:
        """Add a chunk to the iteration."""
        self.first = False
        self.quotas[request_id] = tokens
        self.load = self.load.with_chunk(tokens, attention_s, past)
        self.room -= tokens
        self._model = self._load_s = None

    def refuse(self, full_time: bool) -> None:
        """Note that the request offered last found no time. `full_time`: its budget was that of the iteration; a
        reduced one says nothing about others."""
        self.first = False
        if not self._chunking.timed:
            return
        self._unschedulable += full_time
        # The time is used up: every later chunk costs more than nothing.
        if self.load.tokens and self._predicted_s() >= self.budget_s:
            self._unschedulable = MAX_UNSCHEDULABLE

    def _untimed(self, remaining: int) -> int:
        """Return the tokens of a chunk that is not sized by time; 0: none."""
        if self._chunking.kind == "static":
            return max(0, min(remaining, self.room))
        # More tokens than decodes: the iteration has a prompt already.
        return 0 if self.load.tokens > self.load.decodes and remaining > self.room else remaining

    def _within(self, model: LatencyModel, past: int, most: int, budget_s: float) -> tuple[int, float]:
        """Return (tokens, seconds of their attention) of the largest chunk that keeps the iteration within its time."""
        if not self._literal:
            return solve_tokens(model, self.load, past, most, budget_s, self._decode_s)
        # As printed: the chunk is solved against an empty batch, so its fixed cost is charged a second time.
        left_s = budget_s - (0.0 if is_empty(self.load) else load_s(model, self.load))
        return solve_tokens(model, BatchLoad(), past, most, left_s)

    def _below_floor(
        self, ask: ChunkRequest, model: LatencyModel, floor: int, tokens: int, attention_s: float
    ) -> tuple[int, float]:
        """Return the chunk of a request whose time allows less than the floor: only the first in order gets any."""
        if not self.first:
            return 0, 0.0
        empty = is_empty(self.load)
        # In an empty iteration an oversized chunk delays no decode; an efficient one delays them by a bounded time.
        must = ask.efficient or ask.stalled or (empty and ask.idle)
        # Smallest chunk 0 (Medha as printed) raises one in an empty iteration only: else nothing would ever advance.
        if must and (self._min_chunk or empty):
            return floor, model.attention_s(ask.past, floor)
        # It takes what fits, even below the floor; it does not wait for a larger gap.
        return tokens, attention_s

    def _predicted_s(self) -> float:
        """Return the predicted seconds of `load`."""
        if self._load_s is None:
            if self._decode_s is None:
                self._load_s = load_s(self._latency, self.load)
            else:
                self._load_s = self._latency.rows_s(self.load.tokens) + self._decode_s + self.load.chunk_s
        return self._load_s

    def _exceeds(self, model: LatencyModel, past: int, tokens: int, budget_s: float) -> bool:
        """Whether a chunk of so many tokens makes the iteration longer than the budget, by a model of its own costs."""
        load, attention_s = self.load, model.attention_s(past, tokens)
        if self._decode_s is None:
            return load_s(model, load.with_chunk(tokens, attention_s, past)) > budget_s
        # As `load_s`, without making a load.
        return model.rows_s(load.tokens + tokens) + self._decode_s + (load.chunk_s + attention_s) > budget_s
