"""vLLM's scheduler in virtual time: what is computed in each step, and which request loses its KV.

Rules of vLLM 0.32 (`v1/core/sched`): running requests get their tokens first, in the order in which they began; a step
has `max_num_batched_tokens`, and one request at most the threshold of them unless it is alone. KV is allocated for the
tokens of the step; where it lacks, the last running request (or the least urgent one, by priority) is preempted and
later computed again. If none was, waiting requests begin in the order of their queue, until one does not fit.

Not modelled: speculative decoding, LoRA, encoder inputs, KV connectors, several KV groups, data and pipeline
parallelism. `max_num_partial_prefills` no longer exists in 0.32.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from headway.sim.vllm.block_pool import VllmBlockPool
from headway.sim.vllm.spec import VllmSpec
from headway.sim.vllm.vllm_request import VllmRequestState, VllmWaitingQueue


@dataclass(frozen=True)
class VllmStep:
    """One decision."""

    number: int
    tokens: dict[str, int] = field(default_factory=dict)
    """Tokens by request, in the order in which they were scheduled."""
    past: dict[str, int] = field(default_factory=dict)
    """Tokens with KV of each request before this step."""
    sampled: set[str] = field(default_factory=set)
    """Requests that get an output token."""
    preempted: list[str] = field(default_factory=list)


class SchedulerPlugin(Protocol):
    """What `headway.vllm.Scheduler` overrides."""

    def added(self, request: VllmRequestState) -> None:
        """Note a new request."""

    def before(self, now: float) -> None:
        """Decide, before a step is scheduled."""

    def cap(self, request: VllmRequestState, tokens: int) -> int:
        """Return how many of `tokens` a request may take."""

    def after(self, step: VllmStep, now: float) -> None:
        """Note what a step computes."""

    def preempted(self, request: VllmRequestState) -> None:
        """Note that a request has lost its KV."""

    def returned(self, step: VllmStep, now: float) -> None:
        """Note that a step has ended."""


class VllmScheduler:
    """The scheduler of one engine. Deterministic; a plugin that needs the time is given it with each step."""

    def __init__(self, spec: VllmSpec) -> None:
        self.spec = spec
        self.pool = VllmBlockPool(spec.num_blocks, spec.block_size, spec.enable_prefix_caching)
        self.requests: dict[str, VllmRequestState] = {}
        self.running: list[VllmRequestState] = []
        self.waiting: Any = VllmWaitingQueue(spec.by_priority)
        """`VllmWaitingQueue`; a plugin may put its gate before it."""
        self.ended: list[str] = []
        """Requests that have ended since the last step was scheduled."""
        self.plugin: SchedulerPlugin | None = None
        self.recomputed_tokens = 0
        self._watermark_blocks = int(spec.watermark * spec.num_blocks)
        self._steps = 0

    # -- requests -----------------------------------------------------------------------------------------------

    def add(self, request: VllmRequestState) -> None:
        """Add a new request."""
        self.requests[request.request_id] = request
        self.waiting.add_request(request)
        if self.plugin is not None:
            self.plugin.added(request)

    def abort(self, name: str) -> None:
        """End a request early. Its part of the steps in flight is computed in vain."""
        request = self.requests.get(name)
        if request is not None:
            self._remove(request)
            self._end(request)

    # -- steps --------------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> VllmStep:
        """Return what the next step computes; without tokens there is nothing to do."""
        if self.plugin is not None:
            self.plugin.before(now)
        self._steps += 1
        step = VllmStep(self._steps)
        threshold = self._threshold()
        budget = self._schedule_running(step, self.spec.max_num_batched_tokens, threshold)
        if not step.preempted:
            self._schedule_waiting(step, budget, threshold)
        for name, tokens in step.tokens.items():
            self._advance(step, self.requests[name], tokens)
        self.ended = []
        if self.plugin is not None and step.tokens:
            self.plugin.after(step, now)
        return step

    def update(self, step: VllmStep, now: float) -> tuple[list[str], list[str]]:
        """Apply the results of the oldest step in flight: (requests with a new output token, those that it ended)."""
        got: list[str] = []
        ended: list[str] = []
        for name, tokens in step.tokens.items():
            request = self.requests.get(name)
            # Aborted while it was computed.
            if request is None:
                continue
            request.num_in_flight_tokens -= tokens
            stale = request.num_stale_output_tokens > 0
            if stale:
                request.num_stale_output_tokens -= tokens
            if name in step.sampled:
                got.append(name)
                if self._token(request, stale):
                    ended.append(name)
        if self.plugin is not None and step.tokens:
            self.plugin.returned(step, now)
        return got, ended

    # -- running requests ---------------------------------------------------------------------------------------

    def _threshold(self) -> int:
        """Return the most tokens of one request in this step; 0: no such limit, as for a request that is alone."""
        count = len(self.running) + len(self.waiting)
        threshold = self.spec.long_prefill_token_threshold if count > 1 else 0
        if threshold and self.spec.long_prefill_token_threshold_adaptive:
            threshold = max(threshold, self.spec.max_num_batched_tokens // count)
        return threshold

    def _schedule_running(self, step: VllmStep, budget: int, threshold: int) -> int:
        """Schedule running requests. Return the tokens that are left of the budget."""
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            tokens = 0 if self._has_all_output(request) else self._wanted(request, budget, threshold)
            if tokens == 0:
                index += 1
                continue
            while not self._fits(request, tokens):
                victim = self._victim()
                place = self.running.index(victim)
                del self.running[place]
                if self.spec.by_priority and place < index:
                    index -= 1
                # Only by priority can it have been scheduled in this step already.
                budget += step.tokens.pop(victim.request_id, 0)
                step.past.pop(victim.request_id, None)
                self._preempt(victim)
                step.preempted.append(victim.request_id)
                if victim is request:
                    return budget
            self._take(step, request, tokens)
            budget -= tokens
            index += 1
        return budget

    def _has_all_output(self, request: VllmRequestState) -> bool:
        """Whether the steps in flight are sure to return the last output token."""
        placeholders = request.num_output_placeholders
        limit = request.num_prompt_tokens + request.max_tokens
        return placeholders > 0 and request.num_computed_tokens + 2 - placeholders >= limit

    def _wanted(self, request: VllmRequestState, budget: int, threshold: int) -> int:
        """Return the tokens that a running request gets if its KV has room."""
        tokens = request.num_tokens + request.num_output_placeholders - request.num_computed_tokens
        if 0 < threshold < tokens:
            tokens = threshold
        # A slot is left for the token that is sampled.
        tokens = min(tokens, budget, self.spec.longest_request - request.num_computed_tokens - 1)
        return max(0, tokens if self.plugin is None else self.plugin.cap(request, tokens))

    def _fits(self, request: VllmRequestState, tokens: int) -> bool:
        needed = self.pool.needed_blocks(request.request_id, request.num_computed_tokens + tokens)
        return needed <= self.pool.free_blocks

    def _victim(self) -> VllmRequestState:
        """Return the running request that is preempted next."""
        if self.spec.by_priority:
            return max(self.running, key=lambda r: (r.facts.priority, r.facts.arrival_s))
        return self.running[-1]

    def _preempt(self, request: VllmRequestState) -> None:
        self.pool.free(request.request_id)
        request.running = False
        request.lost_tokens = request.num_computed_tokens
        request.num_computed_tokens = 0
        # Outputs of steps in flight are still delivered, but count on the KV that is gone.
        request.num_stale_output_tokens = request.num_in_flight_tokens
        request.num_output_placeholders = 0
        self.waiting.prepend_request(request)
        if self.plugin is not None:
            self.plugin.preempted(request)

    def _take(self, step: VllmStep, request: VllmRequestState, tokens: int) -> None:
        """Allocate KV for a request's tokens and put them into the step."""
        name, computed = request.request_id, request.num_computed_tokens
        self.pool.allocate(name, computed + tokens)
        self.pool.cache(name, min(computed + tokens, request.num_tokens))
        step.tokens[name] = tokens
        step.past[name] = computed

    # -- waiting requests ---------------------------------------------------------------------------------------

    def _schedule_waiting(self, step: VllmStep, budget: int, threshold: int) -> None:
        skipped: list[VllmRequestState] = []
        while budget > 0 and self.waiting and len(self.running) < self.spec.max_num_seqs:
            request = self.waiting.peek_request()
            # Its output in flight comes first: to begin now could sample the same position twice.
            if request.num_stale_output_tokens:
                skipped.append(self.waiting.pop_request())
                continue
            hit = self.cached_tokens(request)
            tokens = request.num_tokens - hit
            if 0 < threshold < tokens:
                tokens = threshold
            tokens = min(tokens, budget)
            if self.plugin is not None:
                tokens = self.plugin.cap(request, tokens)
            if tokens == 0 or not self._admits(request, hit + tokens):
                break
            request.num_computed_tokens = hit
            self.waiting.pop_request()
            self.running.append(request)
            request.running = True
            self.recomputed_tokens += max(0, request.lost_tokens - hit)
            request.lost_tokens = 0
            self._take(step, request, tokens)
            budget -= tokens
        self.waiting.prepend_requests(reversed(skipped))

    def cached_tokens(self, request: VllmRequestState) -> int:
        """Return the tokens that need no work: in whole blocks, and never the last one."""
        size, most = self.spec.block_size, request.num_tokens - 1
        given = min(request.cached_tokens, most) // size * size
        return max(given, self.pool.cached_tokens(request.request_id, request.num_tokens))

    def _admits(self, request: VllmRequestState, tokens: int) -> bool:
        """Allocate the cached prefix of a waiting request. False: it cannot begin with so many tokens in all."""
        name = request.request_id
        reserved = self._watermark_blocks if self.running else 0
        if self.spec.scheduler_reserve_full_isl:
            tokens = max(tokens, min(request.num_tokens, self.spec.longest_request))
        if self.pool.needed_blocks(name, tokens) + reserved > self.pool.free_blocks:
            return False
        self.pool.adopt(name, self.pool.cached_tokens(name, request.num_tokens))
        return True

    # -- after a step -------------------------------------------------------------------------------------------

    def _advance(self, step: VllmStep, request: VllmRequestState, tokens: int) -> None:
        """Move the cursors at once: the next step is scheduled before this one returns."""
        request.num_computed_tokens += tokens
        request.num_in_flight_tokens += tokens
        request.is_prefill_chunk = request.num_computed_tokens < request.num_tokens + request.num_output_placeholders
        if not request.is_prefill_chunk:
            step.sampled.add(request.request_id)
            if self.spec.async_scheduling:
                request.num_output_placeholders += 1

    def _token(self, request: VllmRequestState, stale: bool) -> bool:
        """Append an output token. Return whether it was the last one, which ends the request."""
        request.num_tokens += 1
        request.num_output_tokens += 1
        stops = request.num_output_tokens >= min(request.output_tokens, request.max_tokens)
        stops = stops or request.num_tokens >= self.spec.longest_request
        if self.spec.async_scheduling:
            if not stale:
                request.num_output_placeholders -= 1
            if request.running:
                self.pool.cache(request.request_id, request.num_computed_tokens - request.num_output_placeholders)
        if stops:
            self._remove(request)
            self._end(request)
        return stops

    def _remove(self, request: VllmRequestState) -> None:
        """Take a request from its queue."""
        if request.running:
            self.running.remove(request)
        else:
            self.waiting.remove_requests([request])

    def _end(self, request: VllmRequestState) -> None:
        name = request.request_id
        del self.requests[name]
        self.pool.free(name)
        self.pool.forget(name, request.num_tokens)
        self.ended.append(name)
