"""Decide what one engine instance computes next: which prefills get how many tokens, next to the running decodes.

The policy sees requests as token counts and latency targets, and KV as numbers of blocks. It has no block tables,
batches, executors or clock, and never waits. Used by Headway's own scheduler and by plug-ins for other engines.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

import msgspec

from headway.core.request import Request
from headway.perf.latency.base import BatchLoad, LatencyModel, load_s
from headway.perf.latency.prefill_cache import PrefillCache
from headway.policy.iteration.admission import KvBlockAdmission
from headway.policy.iteration.candidates import PrefillCandidates, RemoteCost
from headway.policy.iteration.chunk_allocation import ChunkAllocation, is_bounded, pack, rules_of
from headway.policy.iteration.chunking_strategies import make_chunking
from headway.policy.iteration.compute_share import ComputeShare
from headway.policy.iteration.config import SchedulerConfig
from headway.policy.iteration.efficient_chunks import reference_aim_s
from headway.policy.iteration.iteration_budget import IterationBudget
from headway.policy.iteration.kv_pool import KvPool
from headway.policy.iteration.ordering import UrgencyLine
from headway.policy.iteration.predicted_ttft import predicted_ttft_s, prefill_speed
from headway.policy.iteration.prefill import LONG, SEVERAL_ITERATIONS, PrefillState
from headway.policy.iteration.queue import make_queue
from headway.policy.iteration.urgency import UrgencyOrder


class IterationDecision(msgspec.Struct, frozen=True, gc=False):
    """The prefill part of one iteration."""

    quotas: list[ChunkAllocation]
    """Tokens to compute, most urgent request first. A request without a quota gets none."""
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
        self.chunking = make_chunking(config.chunking, config.subtract_times)
        aim_s = reference_aim_s(config, latency)
        times = prefill_times or PrefillCache(latency, aim_s, max(config.min_chunk, 16))
        self.urgency = UrgencyOrder(config, times, aim_s)
        self.relegation = self.urgency.relegation
        # None: prefills may have all the time that budgets leave them.
        self.compute_share = ComputeShare(config.prefill_share) if config.prefill_share < 1 else None
        self.budget = IterationBudget(config, latency)
        self.targets = self.budget.targets
        self.queue = make_queue(self.urgency.policy.parallel)
        self.admission = KvBlockAdmission(config, pool)
        self.holders = self.admission.holders
        self.candidates = PrefillCandidates(config, self.queue, self.admission, remote_cost, self.budget.background_s)
        self._pool = pool
        self._rules = rules_of(config, aim_s)
        self._slack_margin = self._rules.slack_margin
        self._bounded = is_bounded(self.chunking)
        self._states: dict[str, PrefillState] = {}
        self._entered = 0
        self._iterations = 0
        # The last iteration in which any prefill got tokens.
        self._advanced = 0

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
        state.size = self.urgency.size(state.request)
        # `assess` sets the deadline, which a request that decodes at once reports too.
        line = self.urgency.assess(state)
        state.decoding = state.holds_kv and state.remaining == 1
        self.budget.arrived(state, idle=not self._states)
        self._insert(state, line)

    def transfer_in(self, state: PrefillState) -> None:
        """Add a request that has `ended` in another group's policy. It keeps its deadline and isolated time."""
        self._insert(state, None if state.decoding else self.urgency.line(state))

    def moved(self, request_id: str, scheduled: int) -> None:
        """Set the cursor of a prefill: tokens up to `scheduled` are computed or in flight.

        At its end it leaves the queue."""
        state = self._states[request_id]
        state.scheduled = scheduled
        # +1: `began` has not yet counted the iteration that is being built.
        state.last_progress = self._advanced = self._iterations + 1
        state.interrupted = 0
        before_s = state.work_s
        if state.is_long:
            self.urgency.mark_active(state, self.queue)
        if state.remaining == 0:
            self.queue.remove(state)
        else:
            self.queue.update(state, self.urgency.line(state))
        if self.relegation is not None:
            self.relegation.worked(state, before_s - (state.work_s if state.remaining else 0.0))

    def interrupted(self, request_id: str, start: int, tokens: int) -> None:
        """Set the cursor of a prefill back to `start`: a chunk of so many tokens was interrupted, and goes on later."""
        state = self._states[request_id]
        before_s = state.work_s if state.remaining else 0.0
        state.scheduled, state.interrupted = start, tokens
        line = self.urgency.line(state)
        if state.slot < 0:
            self.queue.add(state, line)
        else:
            self.queue.update(state, line)
        if self.relegation is not None:
            self.relegation.worked(state, before_s - state.work_s)

    def decoding(self, request_id: str) -> None:
        """Count a request that has its first output token: iterations keep to its TBT target from now on."""
        self.budget.begin(self._states[request_id], self._iterations, self._long_context)

    def lost(self, request_id: str, known_tokens: int) -> None:
        """Queue a request whose KV is gone: all its `known_tokens`, generated ones included, are computed again."""
        state = self._states[request_id]
        state.generated = known_tokens - state.prompt
        state.scheduled = state.base = state.interrupted = 0
        if state.request.cached_tokens:
            self._count_cached_part(state)
        # Its age in the admission queue starts anew: it had its turn.
        state.skipped_since = None
        self.targets.end(state)
        state.asked_again = 0
        if state.holds_kv:
            self.admission.release(request_id)
            if state.slot >= 0:
                # A half-done prefill is in the queue; a decode (slot < 0) was not counted there.
                self.queue.note_begun(state, False)
            state.holds_kv = False
        if state.slot >= 0:
            self.queue.update(state, self.urgency.line(state))
        else:
            self.queue.add(state, self.urgency.line(state))

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
        if state is self.urgency.active_long:
            self.urgency.active_long = None
        if self.relegation is not None:
            self.relegation.left(state)
        if state.decoding:
            self.targets.leave(state)
        self.admission.release(request_id)

    # -- iterations ---------------------------------------------------------------------------------------------

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
        the same lockstep batch, so a long one here yields time."""
        if not len(self.queue):
            self._rules.slack_margin = self._slack_margin
            return IterationDecision([], load)
        if self._pool.cache is not None:
            for request_id, cached in self._pool.cache.drain_changes():
                self._set_cached(self._states[request_id], cached)
        if self.compute_share is not None and not self.compute_share.grants(load.decodes):
            return IterationDecision([], load)
        # Other chunking ignores the time.
        if self.chunking.timed:
            self._rules.t_target_s = self.budget_s(now) if budget_s is None else budget_s
        if self.relegation is not None:
            speed = prefill_speed(self.latency, load, self._rules.t_target_s)
            self.relegation.choose(now, self.queue, speed, self.urgency.line)
        self.admission.decide()
        candidates = self.candidates.at(now, self._iterations, self._advanced, skip, admits_new)
        if candidates == ():
            return IterationDecision([], load)
        yields_from = self.candidates.yields_from = self.yields_from(shorts_elsewhere, skip)
        admit, pass_over = self._admit, self.candidates.pass_over
        quotas, load = pack(load, candidates, yields_from, self._rules, self.chunking, self.latency, admit, pass_over)
        return IterationDecision(quotas, load)

    def began(self, iterations: int = 1) -> None:
        """Count scheduled iterations, with or without prefills."""
        self._iterations += iterations

    def observed(self, load: BatchLoad, seconds: float) -> None:
        """Pass the measured seconds of an iteration to the latency model, which may learn from it."""
        self.latency.observe(load, seconds)
        # Cached isolated times and efficient chunks follow the corrected model.
        self.budget.observed(self.urgency.prefill_times.refresh())

    def charge(self, load: BatchLoad, seconds: float | None, now: float) -> None:
        """Charge an iteration that ended at `now` to the share of its class; measured seconds, None: as predicted."""
        self.budget.arrivals.busy(now)
        share = self.compute_share
        if share is None:
            return
        prefilled = load.tokens > load.decodes
        contended = load.decodes > 0 and (prefilled or len(self.queue) > 0)
        share.charge(prefilled, contended, load_s(self.latency, load) if seconds is None else seconds, now)
        if share.automatic and contended and len(self.queue):
            oldest = min(self.queue, key=lambda state: state.order)
            share.adjust(now - oldest.request.arrival_s, oldest.work_s, now)

    def predicted_ttft_s(self, request: Request, decodes: BatchLoad, now: float) -> float:
        """Return when a new request would have its first token, seconds after its arrival, beside these decodes."""
        newcomer = PrefillState(request, self._entered)
        newcomer.size = self.urgency.size(request)
        line = self.urgency.assess(newcomer)
        config = self.config
        yields = (config.rho_min, config.rho_max) if config.shares_space else None
        waiting = []
        for state in self.queue:
            before_s = state.work_s
            waiting.append((state, self.urgency.line(state)))
            # Where the latency model has learned, its slack moves, and its place in the queue does not.
            self._rules.slack_margin += 2.0 * abs(state.work_s - before_s) / max(state.total_s, 1e-9)
        speed = prefill_speed(self.latency, decodes, self.budget_s(now))
        return predicted_ttft_s(newcomer, line, waiting, speed, now, yields)

    # -- questions ----------------------------------------------------------------------------------------------

    def order(self, now: float) -> Iterator[PrefillState]:
        """Yield waiting and half-done prefills, most urgent first. Consume it before the policy is changed.

        `skipped_since` is set for those that are blocked for lack of KV."""
        return self.queue.ordered(now)

    def budget_s(self, now: float) -> float:
        """Return the longest next iteration, seconds, that running decodes and a possible newcomer allow."""
        return self.budget.seconds(now, self._iterations, self._long_context)

    @property
    def _long_context(self) -> int:
        """Cached tokens of the long prompt that got tokens last and is not complete; 0: there is none."""
        active = self.urgency.active_long
        return active.scheduled if active is not None and active.slot >= 0 else 0

    def yields_from(self, shorts_elsewhere: bool = False, skip: Collection[str] = ()) -> int:
        """Return the smallest size of prompts that leave part of the next iteration to smaller ones; `LONG` + 1: none.

        A long prompt does while a shorter one waits (Medha §4.3); one of several iterations while one does that takes a
        single iteration, which would be over long before. `shorts_elsewhere`, `skip`: see `pick`."""
        config, sizes = self.config, self.queue.sizes
        if config.shares_space:
            if sizes[SEVERAL_ITERATIONS] and self.smaller_waits(SEVERAL_ITERATIONS, skip):
                return SEVERAL_ITERATIONS
            always = shorts_elsewhere or not config.yield_only_to_shorts
            if sizes[LONG] and (always or self.smaller_waits(LONG, skip)):
                return LONG
        return LONG + 1

    def smaller_waits(self, size: int, skip: Collection[str] = ()) -> bool:
        """Whether a smaller prompt waits that could use yielded time: it holds KV, or there is a free block to begin.

        `skip`: see `pick`."""
        queue = self.queue
        if not any(queue.begun_sizes[:size]):
            full = len(self.holders) >= self.config.max_num_seqs or self._pool.free_blocks <= 0
            if full or not any(queue.sizes[:size]):
                return False
        return not skip or any(state.size < size and state.request.id not in skip for state in queue)

    @property
    def waiting_s(self) -> float:
        """Sum of the predicted isolated seconds left of all waiting and half-done prefills."""
        return sum(state.work_s for state in self.queue)

    def _insert(self, state: PrefillState, line: UrgencyLine | None) -> None:
        """Register a request, in the queue with its urgency line, or as a decode (`line` None)."""
        name = state.request.id
        self._states[name] = state
        state.asked_again = 0
        state.last_progress = self._iterations
        if state.holds_kv:
            self.admission.hold(state)
        # Decodes take part in every iteration and never queue.
        if state.decoding or line is None:
            self.budget.begin(state, self._iterations, self._long_context)
        else:
            self.queue.add(state, line)

    def _count_cached_part(self, state: PrefillState) -> None:
        """Count the cached part of a prompt as work again: its KV is lost, and short work may have become long."""
        queued = state.slot >= 0
        if queued:
            self.queue.remove(state)
        state.size = self.urgency.size_of_work(state.known, 0)
        line = self.urgency.line(state)
        state.total_s = max(state.total_s, state.work_s)
        if queued:
            self.queue.add(state, line)

    def _set_cached(self, state: PrefillState, cached: int) -> None:
        """Let work, class and, before its first output, deadline of a waiting request follow its uncached tokens."""
        if state.holds_kv or state.slot < 0 or cached == state.scheduled:
            return
        # It is counted by class in the queue.
        self.queue.remove(state)
        state.asked_again = 0
        state.set_cached(cached)
        state.size = self.urgency.size_of_work(state.known, cached)
        line = self.urgency.line(state) if state.generated else self.urgency.assess(state)
        self.queue.add(state, line)

    def _admit(self, request_id: str) -> bool:
        """Pledge KV to a request that is about to get its first tokens. False: there is not enough."""
        state = self._states[request_id]
        if not state.holds_kv:
            if not self.admission.enter(state):
                return False
            self.queue.note_begun(state, True)
        # `whole` asks for one more candidate before it finds the iteration full: let it be any.
        self.candidates.long_taken |= state.is_long and self._bounded
        return True
