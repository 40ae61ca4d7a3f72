"""Decide what one engine instance computes next: which prefills get how many tokens beside the running decodes, and the
time to first token that follows for a new request.

`IterationPolicy.pick` is the decision: order the waiting prefills, then fill the iteration's time in that order, and
reserve KV for each that begins. The policy sees requests as token counts and latency targets, and KV as numbers of
blocks. It has no block tables, batches, executors or clock, and never waits. Used by Headway's own scheduler and by
plug-ins for other engines.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final, NamedTuple

import msgspec

from headway.core.request import BACKGROUND_PRIORITY, Request
from headway.perf.latency.base import BatchLoad, LatencyModel, PrefillCache, load_s
from headway.policy.iteration.admission import KvBlockAdmission, KvPool
from headway.policy.iteration.budget import IterationBudget, reference_aim_s
from headway.policy.iteration.config import DEADLINE_BASE_S, DEADLINE_FACTOR, ChunkingRule, SchedulerConfig
from headway.policy.iteration.fill import PROGRESS_EVERY, ChunkRequest, IterationFill, is_empty
from headway.policy.iteration.medha import LONG, MedhaRules
from headway.policy.iteration.ordering import PrefillFacts, UrgencyLine, make_policy
from headway.policy.iteration.queue import LadderQueue, LineQueue, WaitingQueue
from headway.policy.iteration.requests import WHOLE, PrefillState

_LEAST = 0.05
"""However long the decodes take, prefills advance (`fill.PROGRESS_EVERY`)."""


def prefill_speed(latency: LatencyModel, decodes: BatchLoad, budget_s: float) -> float:
    """Return the isolated prefill seconds that a second of iterations of `budget_s` does beside these decodes."""
    if not decodes.decodes or budget_s <= 0:
        return 1.0
    # The fixed cost of an iteration is part of isolated times, and paid once for both.
    beside_s = load_s(latency, decodes) - latency.rows_s(1)
    return min(1.0, max(_LEAST, 1.0 - beside_s / budget_s))


_LAST: Final = 1 << 62
"""An order of arrival behind all others."""
BACKGROUND_GAIN: Final = 2.0
"""An iteration of a background request may take so many times what one of its tokens takes."""
TRIED_EVERY: Final = 8
"""Every so many chunks that a rough model has cut, one is twice as long: chunks of one size do not tell what a token
costs."""


class RemoteCost(NamedTuple):
    """What other KV groups add to a chunk of a request whose earlier shards they hold."""

    past: int
    """Tokens of the largest of these shards."""
    reserved_s: float
    """Seconds by which the busiest of these groups is ahead of the owner group, and the fixed exchange cost."""
    exchange_s_per_row: float
    """Seconds to exchange one row with all of these groups."""


class IterationDecision(msgspec.Struct, frozen=True, gc=False):
    """The prefill part of one iteration."""

    quotas: dict[str, int]
    """Tokens to compute by request, most urgent request first. A request without a quota gets none."""
    load: BatchLoad
    """Load of the decodes with these chunks: pass it to `observed` with the seconds that the iteration took."""


class IterationPolicy:
    """Deterministic: the same calls with the same times give the same quotas.

    Calls for each request, in order: `enter`; `pick` until it has a quota; `moved` once the quota is scheduled;
    `decoding` with its first output token; `lost` whenever its KV is evicted; `ended`. For each iteration: `pick`,
    `began`, `observed`.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        latency: LatencyModel,
        pool: KvPool,
        prefill_times: PrefillCache | None = None,
        remote_cost: Callable[[str], RemoteCost] | None = None,
    ) -> None:
        """`prefill_times`: cache of isolated times, shared by the groups of one instance. `remote_cost`: returns what
        other KV groups add to a chunk of a request whose earlier shards they hold; None: the instance is one group."""
        self.config = config
        self.latency = latency
        self.chunking = ChunkingRule.read(config.chunking)
        aim_s = reference_aim_s(config, latency)
        self.prefill_times = prefill_times or PrefillCache(latency, aim_s, max(config.min_chunk, 16))
        self.budget = IterationBudget(config, latency)
        self.targets = self.budget.targets
        self.admission = KvBlockAdmission(config, pool)
        self.holders = self.admission.holders
        # None: the ladder orders.
        lines = self._lines = make_policy(config.policy)
        self.queue: WaitingQueue = LadderQueue() if lines is None else LineQueue(self._line, lines.parallel)
        rules = config.medha_rules
        self.medha = None if rules is None else MedhaRules(rules, self.prefill_times, aim_s, config.t_target_s)
        self._remote_cost = remote_cost
        self._pool = pool
        self._states: dict[str, PrefillState] = {}
        self._entered = 0
        self._iterations = 0
        # The last iteration in which any prefill got tokens.
        self._advanced = 0
        # The prefill that was cut last: the length of efficient chunks depends on its context.
        self._cut: PrefillState | None = None
        # Chunks that were cut by a rough model.
        self._guessed = 0

    # -- the decision -------------------------------------------------------------------------------------------

    def pick(
        self,
        load: BatchLoad,
        now: float,
        budget_s: float | None = None,
        skip: Collection[str] = (),
        admits_new: bool = True,
        shorts_elsewhere: bool = False,
    ) -> IterationDecision:
        """Choose the prefill tokens of the next iteration, whose decodes are `load` (`latency.base.decode_load`).

        KV of requests that get their first tokens has been pledged by the pool on return. `budget_s`: longest
        iteration, seconds; None: `budget_s(now)`. `skip`: requests that can take no tokens in this iteration.
        `admits_new`: whether requests without KV may begin. `shorts_elsewhere`: short prefills wait in other groups of
        the same lockstep batch, so that under Medha's rules a long one here yields time."""
        queue, admission, medha = self.queue, self.admission, self.medha
        if not len(queue):
            return IterationDecision({}, load)
        cache = self._pool.cache
        if cache is not None:
            for request_id, cached in cache.drain_changes():
                self._set_cached(self._states[request_id], cached)
        if budget_s is None:
            budget_s = self.budget_s(now) if self.chunking.timed else 0.0
        order = queue.ordered(now, lambda: prefill_speed(self.latency, load, budget_s), admission.scarce)
        admission.decide(now, admits_new)
        fill = IterationFill(
            load, budget_s, self.config, self.chunking, self.latency, self.budget.chunks, even=medha is None
        )
        if medha is not None:
            medha.begin(load, self.latency, queue, not admission.closed and admission.free_blocks > 0, shorts_elsewhere)
        # Requests with KV that were offered, for prefixes that they compute.
        ahead = set[str]()
        for place, state in enumerate(order):
            if state is None:
                continue
            if admission.closed or not (admission.free_blocks or state.holds_kv):
                # No further request begins: only those that hold KV are left.
                for begun in queue.begun_from(place):
                    if fill.full:
                        break
                    self._offer(begun, fill, now, skip, ahead)
                break
            self._offer(state, fill, now, skip, ahead)
            if fill.full:
                break
        if medha is not None:
            self._use_yielded_time(medha, fill)
        return IterationDecision(fill.quotas, fill.load)

    def _offer(
        self, state: PrefillState, fill: IterationFill, now: float, skip: Collection[str], ahead: set[str]
    ) -> None:
        """Add a chunk of a request to the iteration, if it has KV or there is room for it, and time for its tokens."""
        request, admission, medha = state.request, self.admission, self.medha
        if skip and request.id in skip:
            return
        if not state.holds_kv:
            if self._pool.cache is not None and admission.waits_for_prefix(state, ahead):
                return
            if not admission.has_room(state, now):
                return
        elif self._pool.cache is not None:
            ahead.add(request.id)
        ask = self._ask(state, fill, now)
        if ask is None:
            return
        tokens, attention_s = self._size(ask, fill)
        if fill.completing and tokens < state.remaining and self._gives_way(state, fill, tokens, attention_s):
            return
        if tokens <= 0:
            fill.refuse(ask.budget_s == fill.budget_s)
            if medha is not None:
                medha.refused(state)
            return
        # Reserve KV last: a request that gets no time must not hold blocks.
        if not state.holds_kv:
            if not admission.enter(state):
                return
            self.queue.note_begun(state, True)
            ahead.add(request.id)
        fill.add(request.id, tokens, attention_s, ask.past)
        if tokens < state.remaining:
            self._cut = state
        else:
            fill.completing += 1
        if medha is not None:
            medha.has_long |= state.medha_size == LONG

    def _size(self, ask: ChunkRequest, fill: IterationFill) -> tuple[int, float]:
        """Return (tokens, seconds of their attention) of a request; some chunks of a rough model are tried twice as
        long."""
        tokens, attention_s = fill.size(ask)
        if self.latency.rough and ask.efficient and 0 < tokens < ask.remaining:
            self._guessed += 1
            if self._guessed % TRIED_EVERY == 0:
                return fill.longer(ask, tokens)
        return tokens, attention_s

    def _gives_way(self, state: PrefillState, fill: IterationFill, tokens: int, attention_s: float) -> bool:
        """Whether a chunk that does not complete its prompt is left out, for the prompts that this iteration completes.

        They would wait for its time; all that wait would gain what one iteration costs less than two. Not twice in
        succession."""
        if self.medha is not None or not self.chunking.timed or self._iterations > state.last_progress:
            return False
        rows_s, before = self.latency.rows_s, fill.load.tokens
        alone_s, longer_s = rows_s(tokens), rows_s(before + tokens) - rows_s(before)
        return (alone_s - longer_s) * len(self.queue) < (longer_s + attention_s) * fill.completing

    def _ask(self, state: PrefillState, fill: IterationFill, now: float) -> ChunkRequest | None:
        """Return a prefill as it is offered to an iteration; None: it can have no token in it."""
        remaining, past, budget_s, medha = state.remaining, state.scheduled, fill.budget_s, self.medha
        if medha is not None and not medha.may_have(state):
            return None
        counts = state.holds_kv or state.request.priority >= BACKGROUND_PRIORITY
        # A request that has not begun counts from the last progress of any prefill.
        stalled = self._iterations - (state.last_progress if counts else self._advanced)
        if state.request.priority >= BACKGROUND_PRIORITY:
            return self._ask_background(state, fill, now, stalled)
        completes, exchange_s, longest_s = True, 0.0, 0.0
        if medha is not None:
            budget_s = medha.longest_s(state, budget_s, now)
        if state.limit != WHOLE:
            # Within the shard: a chunk never crosses its edge, and attends from its first token on.
            completes = remaining <= state.room
            remaining, past = min(remaining, state.room), past - state.base
            # 0: its shard is full and no group has taken over yet.
            if remaining <= 0:
                return None
            if state.base and self._remote_cost is not None:
                remote = self._remote_cost(state.request.id)
                # Shards are attended concurrently: attention takes as long as over the largest.
                past, exchange_s = max(past, remote.past), remote.exchange_s_per_row
                budget_s -= remote.reserved_s
        if medha is not None and completes:
            longest_s = medha.completing_s(state, budget_s)
        return ChunkRequest(
            past, remaining, budget_s, stalled >= PROGRESS_EVERY, self._efficient and state.limit == WHOLE,
            medha is None or not medha.yields(state), longest_s, exchange_s,
        )  # fmt: skip

    def _ask_background(
        self, state: PrefillState, fill: IterationFill, now: float, stalled: int
    ) -> ChunkRequest | None:
        """Return a background request as it is offered: no client waits for it, so its iterations are short."""
        longest_s = self.budget.background_s(now)
        # A prompt for which a client waits has its iterations to itself: after a long context one token is long.
        if fill.quotas and longest_s < fill.budget_s:
            return None
        # Each pass reads the whole context: below this most of the time would go there.
        alone_s = self.latency.rows_s(1) + self.latency.attention_s(state.scheduled, 1)
        budget_s = min(fill.budget_s, max(longest_s, BACKGROUND_GAIN * alone_s))
        return ChunkRequest(state.scheduled, state.remaining, budget_s, stalled >= PROGRESS_EVERY)

    def _use_yielded_time(self, medha: MedhaRules, fill: IterationFill) -> None:
        """Give the smallest chunk to the first request that found no time, if the iteration would otherwise be empty.

        A long request yields time to shorts; where none could use it (no KV, for instance), the instance would idle
        although work waits."""
        state = medha.skipped
        if state is None or fill.quotas or not is_empty(fill.load):
            return
        if not state.holds_kv:
            if not self.admission.enter(state):
                return
            self.queue.note_begun(state, True)
        past, remaining = state.scheduled - state.base, min(state.remaining, state.room)
        tokens = min(max(self.config.min_chunk, 1), remaining, fill.room)
        fill.add(state.request.id, tokens, self.latency.attention_s(past, tokens), past)

    # -- requests -----------------------------------------------------------------------------------------------

    def enter(self, request: Request, holds_kv: bool = False) -> PrefillState:
        """Add a new request and return its state.

        `request.cached_tokens` need no work; `holds_kv`: it has its blocks."""
        state = PrefillState(request, self._entered)
        state.holds_kv = holds_kv
        self._entered += 1
        self.add(state)
        return state

    def add(self, state: PrefillState) -> None:
        """Add a request whose state the caller has made, in order of arrival.

        With KV and one token left to compute it decodes at once."""
        # A request that decodes at once reports its deadline too.
        self._assess(state)
        state.decoding = state.holds_kv and state.remaining == 1
        self.budget.arrivals.arrived(state.request.arrival_s, idle=not self._states)
        self._insert(state)

    def transfer_in(self, state: PrefillState) -> None:
        """Add a request that has `ended` in another group's policy. It keeps its deadline and isolated time."""
        self._insert(state)

    def moved(self, request_id: str, scheduled: int) -> None:
        """Set the cursor of a prefill: tokens up to `scheduled` are computed or in flight.

        At its end it leaves the queue."""
        state = self._states[request_id]
        state.scheduled = scheduled
        # +1: `began` has not yet counted the iteration that is being built.
        state.last_progress = self._advanced = self._iterations + 1
        if self.medha is not None and state.medha_size == LONG:
            before, self.medha.active = self.medha.active, state
            if before is not None and before is not state and before.slot >= 0:
                self._queue_by_work(before)
        if state.remaining == 0:
            self.queue.remove(state)
        else:
            self._queue_by_work(state)

    def decoding(self, request_id: str) -> None:
        """Count a request that has its first output token: iterations keep to its TBT target from now on."""
        self.budget.begin(self._states[request_id], self._iterations, self._context)

    def lost(self, request_id: str, known_tokens: int) -> None:
        """Queue a request whose KV is gone: all its `known_tokens`, generated ones included, are computed again."""
        state = self._states[request_id]
        if state.slot >= 0:
            self.queue.remove(state)
        state.generated = known_tokens - state.prompt
        state.scheduled = state.base = 0
        # Its age in the admission queue starts anew: it had its turn.
        state.skipped_since = None
        self.targets.end(state)
        state.asked_again = 0
        self.admission.release(request_id)
        state.holds_kv = False
        if state.request.cached_tokens:
            # The cached part of a prompt is work again, and short work may have become long.
            state.total_s = max(state.total_s, self._work_s(state))
            if self.medha is not None:
                state.medha_size = self.medha.size(state, 0)
        self._queue_by_work(state)

    def withdraw(self, request_id: str) -> None:
        """Give a request no more tokens: it was aborted in flight. It keeps its KV until `ended`."""
        state = self._states[request_id]
        if state.slot >= 0:
            self.queue.remove(state)

    def ended(self, request_id: str) -> None:
        """Remove a request: finished, aborted, or moved to another group or instance."""
        state = self._states.pop(request_id)
        if state.slot >= 0:
            self.queue.remove(state)
        if self.medha is not None and state is self.medha.active:
            self.medha.active = None
        if state is self._cut:
            self._cut = None
        if state.decoding:
            self.targets.leave(state)
        self.admission.release(request_id)

    # -- iterations ---------------------------------------------------------------------------------------------

    def began(self, iterations: int = 1) -> None:
        """Count scheduled iterations, with or without prefills."""
        self._iterations += iterations

    def observed(self, load: BatchLoad, seconds: float) -> None:
        """Pass the measured seconds of an iteration to the latency model, which may learn from it."""
        self.latency.observe(load, seconds)
        # Cached isolated times and efficient chunks follow the corrected model.
        if self.prefill_times.refresh():
            self.budget.chunks.clear()

    def ended_iteration(self, now: float) -> None:
        """Note that an iteration has ended."""
        self.budget.arrivals.busy(now)

    # -- questions ----------------------------------------------------------------------------------------------

    def order(self, now: float) -> list[PrefillState]:
        """Return waiting and half-done prefills, most urgent first.

        `skipped_since` is set for those that are blocked for lack of KV."""
        return self.queue.current(now)

    def budget_s(self, now: float) -> float:
        """Return the longest next iteration, seconds, that running decodes and a possible newcomer allow."""
        return self.budget.seconds(now, self._iterations, self._context)

    def predicted_ttft_s(self, request: Request, decodes: BatchLoad, now: float) -> float:
        """Return when a new request would have its first token, seconds after its arrival, beside these decodes, if
        none came after it."""
        newcomer = PrefillState(request, _LAST)
        self._assess(newcomer)
        for state in self.queue:
            # Where the latency model has learned, its work and its place have changed.
            self._queue_by_work(state)
        speed = prefill_speed(self.latency, decodes, self.budget_s(now))
        return now - request.arrival_s + (self.queue.work_before_s(newcomer, now, speed) + newcomer.work_s) / speed

    def shorts_wait(self) -> bool:
        """Whether, under Medha's rules, a prompt waits that could use time of a long one of another KV group."""
        free = self._pool.free_blocks > 0 and len(self.holders) < self.config.max_num_seqs
        return self.medha is not None and self.medha.shorts_wait(self.queue, free)

    def yields(self, state: PrefillState) -> bool:
        """Whether, under Medha's rules, a request left time to smaller ones in the last iteration."""
        return self.medha is not None and self.medha.yields(state)

    @property
    def late(self) -> int:
        """Waiting requests that will be late, so that others are in time (ladder)."""
        return self.queue.late if isinstance(self.queue, LadderQueue) else 0

    @property
    def waiting_s(self) -> float:
        """Sum of the predicted isolated seconds left of all waiting and half-done prefills."""
        return sum(state.work_s for state in self.queue)

    # -- details ------------------------------------------------------------------------------------------------

    @property
    def _context(self) -> int:
        """Cached tokens of the prompt that was cut last and is not complete; 0: there is none."""
        cut = self._cut
        return cut.scheduled if cut is not None and cut.slot >= 0 else 0

    @property
    def _efficient(self) -> bool:
        """Whether chunks that are cut must be efficient: no target between tokens was asked for."""
        return self.medha is None and self.config.t_target_s is None and not self.targets.asked

    def _assess(self, state: PrefillState) -> None:
        """Set a new request's isolated time, and when its first token is due."""
        state.total_s = state.work_s = self._work_s(state)
        ttft_s = state.request.slo.ttft_s
        if ttft_s is None:
            rules = self.config.medha_rules
            base_s = DEADLINE_BASE_S if rules is None else rules.deadline_base_s
            factor = DEADLINE_FACTOR if rules is None else rules.deadline_factor
            ttft_s = max(base_s, factor * state.total_s)
        state.deadline_s = state.request.arrival_s + ttft_s
        if self.medha is not None:
            state.medha_size = self.medha.size(state, state.scheduled)

    def _work_s(self, state: PrefillState) -> float:
        """Return the isolated seconds left; above 0, since policies divide by it."""
        return max(1e-6, self.prefill_times.remaining_s(state.known, state.scheduled))

    def _line(self, state: PrefillState) -> UrgencyLine:
        """Return the line of a request under an order other than the ladder."""
        assert self._lines is not None
        line = self._lines.line(PrefillFacts(state.request.arrival_s, state.deadline_s, state.total_s, state.work_s))
        return line if self.medha is None else self.medha.line(state, line)

    def _insert(self, state: PrefillState) -> None:
        """Register a request, in the queue or as a decode."""
        self._states[state.request.id] = state
        state.asked_again = 0
        state.last_progress = self._iterations
        if state.holds_kv:
            self.admission.hold(state)
        # Decodes take part in every iteration and never queue.
        if state.decoding:
            self.budget.begin(state, self._iterations, self._context)
        else:
            self._queue_by_work(state)

    def _queue_by_work(self, state: PrefillState) -> None:
        """Put a request into the queue, or keep it there, at the place that its work left gives it."""
        state.work_s = self._work_s(state)
        self.queue.put(state)

    def _set_cached(self, state: PrefillState, cached: int) -> None:
        """Let the work and, before its first output, deadline of a waiting request follow its uncached tokens."""
        if state.holds_kv or state.slot < 0 or cached == state.scheduled:
            return
        self.queue.remove(state)
        state.asked_again = 0
        state.set_cached(cached)
        if not state.generated:
            self._assess(state)
        elif self.medha is not None:
            state.medha_size = self.medha.size(state, cached)
        self._queue_by_work(state)
