"""What one engine instance computes next: which prefills get how many tokens beside the decodes that run.

The policy sees requests as counts and promises, and KV as numbers of blocks. It knows no block tables, batches or
executors, reads no clock and never waits: Headway's own scheduler and plug-ins for other engines decide with it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

import msgspec
from msgspec.structs import replace

from headway.core.request import Request
from headway.perf.latency.base import BatchLoad, LatencyModel
from headway.perf.latency.prefill_cache import PrefillCache
from headway.policy.iteration.admission import KvBlockAdmission
from headway.policy.iteration.candidates import PrefillCandidates, RemoteCost
from headway.policy.iteration.chunking import make_chunking
from headway.policy.iteration.config import SchedulerConfig
from headway.policy.iteration.kv_pool import KvPool
from headway.policy.iteration.ordering import UrgencyLine
from headway.policy.iteration.packer import ChunkQuota, pack, rules_of
from headway.policy.iteration.prefill import PrefillState
from headway.policy.iteration.queue import make_queue
from headway.policy.iteration.tbt_targets import TbtTargets
from headway.policy.iteration.urgency import UrgencyOrder


class IterationDecision(msgspec.Struct, frozen=True, gc=False):
    """The prefill part of one iteration."""

    quotas: list[ChunkQuota]
    """Tokens to compute, most urgent request first. A request that is not named gets none."""
    load: BatchLoad
    """The decodes with these chunks: pass it to `observed` with the time that the iteration took."""


class IterationPolicy:
    """Deterministic: the same calls with the same times give the same quotas.

    Of each request, in order: `enter`; `pick` until it has a quota; `moved` once the quota is scheduled; `decoding`
    with its first output token; `lost` whenever its KV is taken; `ended`. Of each iteration: `pick`, `began`,
    `observed`.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        latency: LatencyModel,
        pool: KvPool,
        prefill_times: PrefillCache | None = None,
        remote_cost: Callable[[str], RemoteCost] | None = None,
    ) -> None:
        """`prefill_times`: a cache shared by the groups of one instance. `remote_cost`: what other KV groups add to a
        chunk of a request whose earlier KV they hold; None: the instance is one group."""
        self.config = config
        self.latency = latency
        self.chunking = make_chunking(config.chunking, config.subtract_times)
        times = prefill_times or PrefillCache(latency, config.t_target_s, max(config.min_chunk, 16))
        self.urgency = UrgencyOrder(config, times)
        self.targets = TbtTargets(config.stages)
        self.queue = make_queue(self.urgency.policy.parallel)
        self.admission = KvBlockAdmission(config, pool)
        self.holders = self.admission.holders
        self.candidates = PrefillCandidates(config, self.queue, self.admission, remote_cost)
        self._pool = pool
        self._rules = rules_of(config)
        self._states: dict[str, PrefillState] = {}
        self._entered = 0
        self._iterations = 0
        self._advanced = 0  # the iteration in which any prefill got tokens last

    # -- requests -----------------------------------------------------------------------------------------------

    def enter(self, request: Request, holds_kv: bool = False) -> PrefillState:
        """A request has come; `request.cached_tokens` need no work. `holds_kv`: it has its blocks already."""
        state = PrefillState(request, self._entered)
        state.holds_kv = holds_kv
        self._entered += 1
        self.add(state)
        return state

    def add(self, state: PrefillState) -> None:
        """`enter` for an owner that makes the states itself, in order of arrival. With KV and one token to compute it
        decodes at once."""
        state.is_long = self.urgency.is_long(state.request)
        line = self.urgency.assess(state)
        state.decoding = state.holds_kv and state.remaining == 1
        self._insert(state, line)

    def transfer_in(self, state: PrefillState) -> None:
        """Take over a request from another group's policy, in which it has `ended`. It keeps its deadline."""
        self._insert(state, None if state.decoding else self.urgency.line(state))

    def moved(self, request_id: str, scheduled: int) -> None:
        """A prefill's tokens up to `scheduled` are computed or in flight. It stops waiting when these are all."""
        state = self._states[request_id]
        state.scheduled = scheduled
        state.last_progress = self._advanced = self._iterations + 1
        if state.is_long:
            self.urgency.mark_active(state, self.queue)
        if state.remaining == 0:
            self.queue.remove(state)
        else:
            self.queue.update(state, self.urgency.line(state))

    def decoding(self, request_id: str) -> None:
        """A request has its first output token: iterations keep to its TBT from now on."""
        self.targets.begin(self._states[request_id])

    def lost(self, request_id: str, known_tokens: int) -> None:
        """The KV of a request is gone: all its `known_tokens`, generated ones included, are to be computed again."""
        state = self._states[request_id]
        state.generated = known_tokens - state.prompt
        state.scheduled = state.base = 0
        state.skipped_since = None
        self.targets.end(state)
        if state.holds_kv:
            del self.holders[request_id]
            if state.slot >= 0:
                self.queue.note_begun(state, False)
            state.holds_kv = False
        if state.slot >= 0:
            self.queue.update(state, self.urgency.line(state))
        else:
            self.queue.add(state, self.urgency.line(state))

    def withdraw(self, request_id: str) -> None:
        """A request gets no more tokens. It keeps its KV until it has `ended`."""
        state = self._states[request_id]
        if state.slot >= 0:
            self.queue.remove(state)

    def ended(self, request_id: str) -> None:
        """A request takes part in no later iteration: finished, aborted, or moved elsewhere with its KV."""
        state = self._states.pop(request_id)
        if state.slot >= 0:
            self.queue.remove(state)
        if state is self.urgency.active_long:
            self.urgency.active_long = None
        if state.decoding:
            self.targets.leave(state)
        self.holders.pop(request_id, None)

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
        """The prefill tokens that go beside `load`, the decodes of the next iteration (`latency.base.decode_load`).

        Requests that are given their first tokens have had their KV pledged by the pool. `budget_s`: the longest
        iteration; None: the aim, or the shortest TBT target of a running request. `skip`: requests that can take
        nothing in this iteration. `admits_new`: whether requests without KV may begin. `shorts_elsewhere`: short
        prefills of other groups wait for the same iteration, so that a long one here yields time."""
        if not len(self.queue):
            return IterationDecision([], load)
        config = self.config
        least_s = self.targets.least(config.t_target_s) if budget_s is None else budget_s
        t_target_s = max(least_s, config.least_gain * self.latency.rows_s(1))
        if t_target_s != self._rules.t_target_s:
            self._rules = replace(self._rules, t_target_s=t_target_s)
        shorts_wait = self.queue.longs > 0 and (shorts_elsewhere or not config.yield_only_to_shorts or self.shorts_wait)
        candidates = self.candidates.at(now, self._iterations, self._advanced, skip, admits_new)
        quotas, load = pack(load, candidates, shorts_wait, self._rules, self.chunking, self.latency, self._admit)
        return IterationDecision(quotas, load)

    def began(self, iterations: int = 1) -> None:
        """So many iterations have been scheduled, with or without prefills."""
        self._iterations += iterations

    def observed(self, load: BatchLoad, seconds: float) -> None:
        """An iteration of this load took `seconds`: corrects a latency model that learns."""
        self.latency.observe(load, seconds)
        self.urgency.prefill_times.refresh()

    # -- questions ----------------------------------------------------------------------------------------------

    def order(self, now: float) -> Iterator[PrefillState]:
        """Waiting and half-done prefills, most urgent first; `skipped_since` tells those that are blocked for want of
        KV. Consume it before the policy is changed."""
        return self.queue.ordered(now)

    @property
    def shorts_wait(self) -> bool:
        """Whether a short prefill waits that could use time: it has begun, or there is room to begin."""
        queue = self.queue
        room = len(self.holders) < self.config.max_num_seqs and self._pool.free_blocks > 0
        return queue.begun_shorts > 0 or (queue.shorts > 0 and room)

    @property
    def waiting_s(self) -> float:
        """Predicted seconds of all prefills that wait or are half done, each alone."""
        return sum(state.work_s for state in self.queue)

    def _insert(self, state: PrefillState, line: UrgencyLine | None) -> None:
        """`line` None: it decodes."""
        name = state.request.id
        self._states[name] = state
        if state.holds_kv:
            self.holders[name] = state
            state.last_progress = self._iterations
        if state.decoding or line is None:  # nothing in the queue goes before a decode
            self.targets.begin(state)
        else:
            self.queue.add(state, line)

    def _admit(self, request_id: str) -> bool:
        """Have KV pledged to a request that is about to get its first tokens."""
        state = self._states[request_id]
        if state.holds_kv:
            return True
        entered = self.admission.enter(state)
        if entered:
            self.queue.note_begun(state, True)
        return entered
