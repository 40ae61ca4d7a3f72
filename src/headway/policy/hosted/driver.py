"""Driver of an `IterationPolicy` over the requests of vLLM's scheduler: events in, quotas out.

Nothing here imports vLLM: requests are read through a few attributes of vLLM's, so that a driver can be rebuilt from
vLLM's state at any time, and the simulator's model of vLLM (`sim.vllm`) runs the same code.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from headway.core.request import Request
from headway.perf.latency.base import BatchLoad, decode_load, load_s, one_chunk_s
from headway.policy.hosted.reserved_kv_pool import ReservedKvPool
from headway.policy.hosted.running_tally import RunningTally
from headway.policy.iteration.decision import IterationPolicy
from headway.policy.iteration.prefill import PrefillState

VllmRequest = Any
"""`vllm.v1.request.Request`, or the simulator's `VllmRequestState`."""


class StepPlan(msgspec.Struct, frozen=True):
    """The policy's decision for one step."""

    quotas: dict[str, int]
    """Tokens by request, most urgent first; a prefill that is not named gets none."""
    load: BatchLoad
    """Load of the decodes and these chunks."""
    predicted_s: float


class PolicyDriver:
    """The requests that the policy decides about: each is a prefill (waiting or half done), and later a decode."""

    def __init__(self, policy: IterationPolicy, pool: ReservedKvPool) -> None:
        self.policy = policy
        self.pool = pool
        self.prefills: dict[str, VllmRequest] = {}
        # Requests that have had their first token, and counts over all that run.
        self.decoding: dict[str, VllmRequest] = {}
        self.tally = RunningTally(self.decoding)
        # Requests whose prompt was completed by the last `advance`.
        self.completed: list[tuple[PrefillState, VllmRequest]] = []

    def __contains__(self, request_id: str) -> bool:
        return request_id in self.prefills or request_id in self.decoding

    # -- requests -----------------------------------------------------------------------------------------------

    def enter(self, facts: Request, request: VllmRequest, running: bool = False) -> None:
        """Add a request. `running`: it has KV for `facts.cached_tokens` tokens already (when a driver is rebuilt)."""
        if running:
            self.pool.pledge(facts.id, facts.prompt_tokens)
        decodes = running and facts.cached_tokens >= facts.prompt_tokens - 1
        self.policy.enter(facts, holds_kv=running)
        if decodes:
            self.pool.complete(facts.id)
            self.decoding[facts.id] = request
        else:
            self.prefills[facts.id] = request
            if running:
                self.tally.begun.add(facts.id)

    def lost(self, request: VllmRequest) -> None:
        """Requeue a request that vLLM has preempted: all its tokens are computed again."""
        name = request.request_id
        if name in self:
            self.pool.drop(name)
            self.tally.lost(name)
            self.decoding.pop(name, None)
            self.prefills[name] = request
            self.policy.lost(name, request.num_tokens)

    def ended(self, request_id: str) -> None:
        """Remove a finished or aborted request. Unknown ones are ignored."""
        if request_id in self:
            self.pool.drop(request_id)
            self.tally.ended(request_id)
            self.decoding.pop(request_id, None)
            self.prefills.pop(request_id, None)
            self.policy.ended(request_id)

    # -- steps --------------------------------------------------------------------------------------------------

    def plan_step(
        self,
        running: list[VllmRequest],
        now: float,
        admits_new: bool,
        rows_each: int = 1,
        recount: bool = False,
        barred: Collection[str] = (),
    ) -> tuple[StepPlan, list[VllmRequest]] | None:
        """Return the quotas of the next step beside the decodes among `running`, each of `rows_each` rows; and
        `running` with decodes first, then prefills by urgency, since vLLM preempts from its end.

        `recount`: cached tokens of running requests may have changed otherwise than by `scheduled`. `barred`: waiting
        requests that vLLM would not start in this step.
        None: the policy would wait although nothing runs that could free KV; the caller lets vLLM decide."""
        decodes, kv_sum = self.tally.decodes_of(running, recount or rows_each > 1)
        plan = self.plan(decodes, rows_each * decodes, kv_sum, now, admits_new, barred)
        if not (plan.quotas or running or self.prefills.keys() <= set(barred)):
            return None
        # Prefills end the list, but for those whose last chunk was in the step before: look at the end only.
        first, wanted = len(running), len(running) - decodes
        prefills: list[VllmRequest] = []
        while len(prefills) < wanted:
            first -= 1
            if running[first].is_prefill_chunk:
                prefills.append(running[first])
        prefills.reverse()
        # Mostly they are in order already.
        if [request.request_id for request in prefills[: len(plan.quotas)]] != [*plan.quotas]:
            place = {name: i for i, name in enumerate(plan.quotas)}
            prefills.sort(key=lambda request: place.get(request.request_id, len(place)))
        end = running[first:]
        if prefills == end:
            return plan, running
        return plan, running[:first] + [request for request in end if not request.is_prefill_chunk] + prefills

    def quota(self, plan: StepPlan, request_id: str, running: bool) -> int | None:
        """Return the tokens that a request may take; None: no limit by the policy."""
        quota = plan.quotas.get(request_id)
        if quota is not None or request_id not in self.prefills:
            return quota
        # Not running: its KV was loaded by a connector, and vLLM ends its scan where such a request gets nothing.
        return 0 if running else int(self.policy.config.min_chunk)

    def plan(
        self, decodes: int, rows: int, kv_sum: int, now: float, admits_new: bool, barred: Collection[str] = ()
    ) -> StepPlan:
        """Return the quotas of a step in which `decodes` requests decode, in `rows` rows over `kv_sum` tokens.

        `barred`: see `plan_step`."""
        load = decode_load(self.policy.latency, decodes, kv_sum)
        # Speculative tokens are verified in rows of their own.
        if rows != decodes:
            load = msgspec.structs.replace(load, tokens=rows)
        if self.prefills:
            decision = self.policy.pick(load, now, skip=barred, admits_new=admits_new)
            quotas, load = {quota.request: quota.tokens for quota in decision.quotas}, decision.load
        else:
            quotas = {}
        return StepPlan(quotas, load, load_s(self.policy.latency, load))

    def scheduled(self, plan: StepPlan, tokens: Mapping[str, int]) -> BatchLoad:
        """Move the policy by the tokens that vLLM has scheduled of each request. Return the actual load of the step."""
        chunks = {name: tokens[name] for name in tokens.keys() & self.prefills.keys()}
        rows = sum(tokens.values()) - sum(chunks.values())
        self.tally.computed(rows)
        return self.advance(plan, chunks, len(tokens) - len(chunks), rows)

    def advance(self, plan: StepPlan, chunks: Mapping[str, int], others: int, rows: int) -> BatchLoad:
        """See `scheduled`: tokens by prefill, and the number of all other requests with their tokens."""
        tokens = sum(chunks.values())
        exact = sum(plan.quotas.values()) == tokens and plan.load.tokens == tokens + rows
        load = plan.load if exact else self._real_load(plan, chunks, others, rows)
        self.completed = []
        for name in sorted(chunks, key=self._place(plan)) if len(chunks) > 1 else chunks:
            self._advance(name)
        self.policy.began()
        return load

    def observed(self, load: BatchLoad, seconds: float) -> None:
        """Pass the measured duration of a step to the latency model."""
        self.policy.budget.arrivals.worked(seconds)
        self.policy.observed(load, seconds)

    def _advance(self, name: str) -> None:
        """Move the policy's cursor to vLLM's, which decides when outputs in flight have let the prompt grow."""
        request = self.prefills[name]
        state = self.policy.holders.get(name)
        known = state.known if state is not None else request.num_tokens
        if request.is_prefill_chunk:
            # Still a prefill for vLLM: keep one token, so that the policy does not count it as complete.
            self.policy.moved(name, min(request.num_computed_tokens, known - 1))
            self.pool.settle(name)
            self.tally.begun.add(name)
            return
        self.policy.moved(name, known)
        self.policy.decoding(name)
        if state is not None:
            self.completed.append((state, request))
        self.pool.complete(name)
        self.decoding[name] = request
        self.tally.decoding_from_now(name)
        del self.prefills[name]

    def _real_load(self, plan: StepPlan, chunks: Mapping[str, int], others: int, rows: int) -> BatchLoad:
        """Return the load if vLLM has scheduled other numbers: limits of its own, or requests outside the policy."""
        latency = self.policy.latency
        load = decode_load(latency, others, plan.load.decode_kv)
        load = msgspec.structs.replace(load, tokens=rows)
        for name in sorted(chunks):
            count = chunks[name]
            past = max(0, self.prefills[name].num_computed_tokens - count)
            load = load.with_chunk(count, one_chunk_s(latency, past, count), past)
            latency = latency.further_prompts()
        return load

    @staticmethod
    def _place(plan: StepPlan) -> Any:
        places = {name: place for place, name in enumerate(plan.quotas)}
        return lambda name: (places.get(name, len(places)), name)
