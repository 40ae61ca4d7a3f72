"""Keeps an `IterationPolicy` in step with the requests of vLLM's scheduler, and turns its decisions into quotas.

Nothing here imports vLLM: requests are read through the few attributes that `adapter` promises, so that a driver can
be rebuilt from what vLLM knows at any time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from headway.core.request import Request
from headway.perf.latency.base import BatchLoad, decode_load, load_s, one_chunk_s
from headway.policy.iteration.decision import IterationPolicy
from headway.vllm.kv_pool import VllmKvPool

VllmRequest = Any
"""`vllm.v1.request.Request`."""


class StepPlan(msgspec.Struct, frozen=True):
    """What the policy wants of one step."""

    quotas: dict[str, int]
    """Tokens by request, most urgent first; a prefill that is not named gets none."""
    load: BatchLoad
    """The decodes and these chunks."""
    predicted_s: float


class PolicyDriver:
    """The requests that the policy decides about: each is a prefill (waiting or half done), and later a decode."""

    def __init__(self, policy: IterationPolicy, pool: VllmKvPool) -> None:
        self.policy = policy
        self.pool = pool
        self.prefills: dict[str, VllmRequest] = {}
        self._decoding: set[str] = set()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self.prefills or request_id in self._decoding

    # -- requests -----------------------------------------------------------------------------------------------

    def enter(self, facts: Request, request: VllmRequest, running: bool = False) -> None:
        """A request has come. `running`: it has KV already, for `facts.cached_tokens` tokens (when a driver is made
        anew)."""
        if running:
            self.pool.pledge(facts.id, facts.prompt_tokens)
        decodes = running and facts.cached_tokens >= facts.prompt_tokens - 1
        self.policy.enter(facts, holds_kv=running)
        if decodes:
            self.pool.complete(facts.id)
            self._decoding.add(facts.id)
        else:
            self.prefills[facts.id] = request

    def lost(self, request: VllmRequest) -> None:
        """vLLM has preempted a request: all its tokens are to be computed again."""
        name = request.request_id
        if name in self:
            self.pool.drop(name)
            self._decoding.discard(name)
            self.prefills[name] = request
            self.policy.lost(name, request.num_tokens)

    def ended(self, request_id: str) -> None:
        """A request is finished or aborted. Unknown ones are ignored."""
        if request_id in self:
            self.pool.drop(request_id)
            self._decoding.discard(request_id)
            self.prefills.pop(request_id, None)
            self.policy.ended(request_id)

    # -- steps --------------------------------------------------------------------------------------------------

    def plan(self, decodes: int, rows: int, kv_sum: int, now: float, admits_new: bool) -> StepPlan:
        """Quotas of the next step, in which so many requests decode, in so many rows, over so many cached tokens."""
        load = decode_load(self.policy.latency, decodes, kv_sum)
        if rows != decodes:  # speculative tokens are verified in rows of their own
            load = msgspec.structs.replace(load, tokens=rows)
        if self.prefills:
            decision = self.policy.pick(load, now, admits_new=admits_new)
            quotas, load = {quota.request: quota.tokens for quota in decision.quotas}, decision.load
        else:
            quotas = {}
        return StepPlan(quotas, load, load_s(self.policy.latency, load))

    def scheduled(self, plan: StepPlan, tokens: Mapping[str, int]) -> BatchLoad:
        """vLLM has scheduled so many tokens of each request. Returns the load that the step really is."""
        chunks = [name for name in tokens.keys() & self.prefills.keys() if name in tokens]
        exact = sum(plan.quotas.values()) == sum(tokens[name] for name in chunks) and (
            plan.load.tokens == sum(tokens.values())
        )
        load = plan.load if exact else self._real_load(plan, tokens, chunks)
        for name in sorted(chunks, key=self._place(plan)):
            self._advance(name)
        self.policy.began()
        return load

    def observed(self, load: BatchLoad, seconds: float) -> None:
        """A step of this load took so long."""
        self.policy.observed(load, seconds)

    def _advance(self, name: str) -> None:
        """Move the policy's cursor to vLLM's. Where outputs in flight let vLLM's prompt grow, vLLM's word counts."""
        request = self.prefills[name]
        state = self.policy.holders.get(name)
        known = state.known if state is not None else request.num_tokens
        if request.is_prefill_chunk:
            self.policy.moved(name, min(request.num_computed_tokens, known - 1))
            self.pool.settle(name)
            return
        self.policy.moved(name, known)
        self.policy.decoding(name)
        self.pool.complete(name)
        self._decoding.add(name)
        del self.prefills[name]

    def _real_load(self, plan: StepPlan, tokens: Mapping[str, int], chunks: Iterable[str]) -> BatchLoad:
        """Where vLLM gave other numbers than asked: a limit of its own, or requests that no policy decides about."""
        latency, names = self.policy.latency, set(chunks)
        others = [count for name, count in tokens.items() if name not in names]
        load = decode_load(latency, len(others), plan.load.decode_kv)
        load = msgspec.structs.replace(load, tokens=sum(others))
        for name in names:
            count = tokens[name]
            past = max(0, self.prefills[name].num_computed_tokens - count)
            load = load.with_chunk(count, one_chunk_s(latency, past, count), past)
        return load

    @staticmethod
    def _place(plan: StepPlan) -> Any:
        places = {name: place for place, name in enumerate(plan.quotas)}
        return lambda name: (places.get(name, len(places)), name)
