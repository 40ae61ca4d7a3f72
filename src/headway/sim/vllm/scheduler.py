"""vLLM's scheduler in virtual time, its block pool with the prefix cache, and its requests.

Rules of vLLM 0.32 (`v1/core/sched`): running requests get their tokens first, in the order in which they began; a step
has `max_num_batched_tokens`, and one request at most the threshold of them unless it is alone. KV is allocated for the
tokens of the step; where it lacks, the last running request (or the least urgent one, by priority) is preempted and
later computed again. If none was, waiting requests begin in the order of their queue, until one does not fit. Of 0.33:
`prefill_schedule_interval`, which acts without data parallelism from that version on.

Not modelled: speculative decoding, LoRA, encoder inputs, KV connectors, several KV groups, data and pipeline
parallelism. `max_num_partial_prefills` no longer exists in 0.32.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from headway.core.request import Request
from headway.sim.spec import VllmSpec

# vLLM's KV blocks of one full-attention group, with its prefix cache.
#
# Requests of a workload are taken to share no text, so that a cached block is found again only by the request that
# filled it, after a preemption. The order in which free blocks are taken decides which of them are still there by then.

_CacheKey = tuple[str, int]
"""(request, index of the block in it)."""
_NULL_BLOCK = 0


class VllmBlockPool:
    """Free blocks in the order in which they are taken, and the blocks of each request."""

    def __init__(self, num_blocks: int, block_size: int, caching: bool) -> None:
        """`num_blocks`: the null block included, which is never given to a request."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.caching = caching
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(
            block for block in range(num_blocks) if block != _NULL_BLOCK
        )
        self._held: dict[str, list[int]] = {}
        # Full blocks of a running request that are in the prefix cache.
        self._cached_blocks: dict[str, int] = {}
        # A prefix that was computed twice has two blocks: the older is found.
        self._cache: dict[_CacheKey, list[int]] = {}
        self._key_of: dict[int, _CacheKey] = {}

    @property
    def free_blocks(self) -> int:
        """Blocks that can be allocated, cached ones included."""
        return len(self._free)

    @property
    def used_blocks(self) -> int:
        """Blocks that requests hold."""
        return self.num_blocks - 1 - len(self._free)

    def blocks_for(self, tokens: int) -> int:
        """Return the blocks that hold so many tokens."""
        return -(-tokens // self.block_size)

    def held_blocks(self, name: str) -> int:
        """Return the blocks of a request."""
        return len(self._held.get(name, ()))

    def cached_tokens(self, name: str, tokens: int) -> int:
        """Return the tokens at the start of a request without blocks that the prefix cache has, in whole blocks.

        At most `tokens` - 1: one token must be computed for its output."""
        return len(self._hits(name, tokens)) * self.block_size

    def needed_blocks(self, name: str, tokens: int) -> int:
        """Return the free blocks that a request takes for `tokens` tokens in all; cached ones are among the free."""
        return max(0, self.blocks_for(tokens) - self.held_blocks(name))

    def adopt(self, name: str, tokens: int) -> None:
        """Give a request without blocks those of its first `tokens` tokens from the prefix cache."""
        hits = self._hits(name, tokens + 1)
        for block in hits:
            del self._free[block]
        self._held[name] = hits
        self._cached_blocks[name] = len(hits)

    def allocate(self, name: str, tokens: int) -> None:
        """Take free blocks, so that the request has enough for `tokens` tokens. The caller has checked that they are
        there."""
        held = self._held.setdefault(name, [])
        for _ in range(self.blocks_for(tokens) - len(held)):
            block, _none = self._free.popitem(last=False)
            self._evict(block)
            held.append(block)

    def cache(self, name: str, tokens: int) -> None:
        """Enter the full blocks of a request's first `tokens` tokens in the prefix cache."""
        if not self.caching:
            return
        held, full = self._held[name], tokens // self.block_size
        for index in range(self._cached_blocks.get(name, 0), full):
            self._key_of[held[index]] = (name, index)
            self._cache.setdefault((name, index), []).append(held[index])
        self._cached_blocks[name] = max(full, self._cached_blocks.get(name, 0))

    def free(self, name: str) -> None:
        """Free the blocks of a request: those without cached content are taken next, the others last, tail first."""
        blocks = self._held.pop(name, [])
        self._cached_blocks.pop(name, None)
        blocks.reverse()
        self._append(block for block in blocks if block in self._key_of)
        for block in reversed([block for block in blocks if block not in self._key_of]):
            self._free[block] = None
            self._free.move_to_end(block, last=False)

    def forget(self, name: str, tokens: int) -> None:
        """Drop the cache entries of a request that has ended; the order of free blocks stays."""
        for index in range(tokens // self.block_size + 1):
            for block in self._cache.pop((name, index), ()):
                del self._key_of[block]

    def _append(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._free[block] = None

    def _hits(self, name: str, tokens: int) -> list[int]:
        """Return the cached blocks of the first `tokens` - 1 tokens, up to the first that is missing."""
        found: list[int] = []
        for index in range((tokens - 1) // self.block_size):
            blocks = self._cache.get((name, index))
            if not blocks:
                break
            found.append(blocks[0])
        return found

    def _evict(self, block: int) -> None:
        key = self._key_of.pop(block, None)
        if key is not None:
            left = self._cache[key]
            left.remove(block)
            if not left:
                del self._cache[key]


class VllmRequestState:
    """Counters of one request, by the names of vLLM's own `Request`, which `policy.hosted` reads."""

    __slots__ = (
        "cached_tokens", "facts", "is_prefill_chunk", "lost_tokens", "num_computed_tokens", "num_in_flight_tokens",
        "num_output_placeholders", "num_output_tokens", "num_prompt_tokens", "num_stale_output_tokens", "num_tokens",
        "output_tokens", "request_id", "running",
    )  # fmt: skip

    def __init__(self, facts: Request, output_tokens: int) -> None:
        """`output_tokens`: after how many it stops, which the scheduler does not know; at most
        `facts.max_output_tokens`."""
        self.facts = facts
        self.request_id = facts.id
        self.num_prompt_tokens = self.num_tokens = facts.prompt_tokens
        self.output_tokens = output_tokens
        self.num_output_tokens = 0
        self.num_computed_tokens = 0
        """Tokens with KV, those of steps in flight included."""
        self.num_output_placeholders = 0
        """Output tokens that steps in flight will return (asynchronous scheduling)."""
        self.num_in_flight_tokens = 0
        self.num_stale_output_tokens = 0
        """Tokens in flight at the last preemption: their outputs count, their KV is gone."""
        self.is_prefill_chunk = False
        self.running = False
        self.lost_tokens = 0
        """Tokens computed before the last preemption, until the request resumes."""
        self.cached_tokens = facts.cached_tokens
        """Prompt tokens whose KV another request or server has, as the workload says."""

    @property
    def max_tokens(self) -> int:
        """Output that the client allows."""
        return self.facts.max_output_tokens

    @property
    def key(self) -> tuple[int, float, str]:
        """Place in a priority queue: priority, arrival, id."""
        return self.facts.priority, self.facts.arrival_s, self.request_id


class VllmWaitingQueue:
    """vLLM's waiting requests, first come first served or by priority; the methods are those of its `RequestQueue`."""

    def __init__(self, by_priority: bool) -> None:
        self._by_priority = by_priority
        self._requests: list[VllmRequestState] = []

    def add_request(self, request: VllmRequestState) -> None:
        """Add a request at its place, the end without priorities."""
        if self._by_priority:
            insort(self._requests, request, key=lambda r: r.key)
        else:
            self._requests.append(request)

    def prepend_request(self, request: VllmRequestState) -> None:
        """Add a request before all others; by priority at its place."""
        if self._by_priority:
            self.add_request(request)
        else:
            self._requests.insert(0, request)

    def prepend_requests(self, requests: Iterable[VllmRequestState]) -> None:
        """Prepend one after the other, so that the last is first."""
        for request in requests:
            self.prepend_request(request)

    def peek_request(self) -> VllmRequestState:
        """Return the first request."""
        return self._requests[0]

    def pop_request(self) -> VllmRequestState:
        """Remove and return the first request."""
        return self._requests.pop(0)

    def remove_request(self, request: VllmRequestState) -> None:
        """Remove a request."""
        self._requests.remove(request)

    def remove_requests(self, requests: Iterable[VllmRequestState]) -> None:
        """Remove those that are here."""
        gone = set(requests)
        self._requests = [request for request in self._requests if request not in gone]

    def __bool__(self) -> bool:
        return bool(self._requests)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[VllmRequestState]:
        return iter(self._requests)


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
        self._steps = self._executed = 0
        # number of the last executed step with a prefill; a full interval back: the first one is not held
        self._prefilled = -spec.prefill_schedule_interval
        self._prefills = False
        # whether the last step that might begin requests left some waiting: nothing is held then
        self._backlog = False

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
        threshold, held, self._prefills = self._threshold(), self._holds_prefills(), False
        budget = self._schedule_running(step, self.spec.max_num_batched_tokens, threshold, held)
        if not step.preempted:
            self._schedule_waiting(step, budget, threshold, held)
        self._executed += bool(step.tokens)
        if self._prefills:
            self._prefilled = self._executed
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

    def _holds_prefills(self) -> bool:
        """Whether prefills wait for a later step: the interval since the last of them has not passed, requests decode,
        and the waiting queue was emptied then."""
        early = self._executed + 1 - self._prefilled < self.spec.prefill_schedule_interval
        return early and not self._backlog and any(not request.is_prefill_chunk for request in self.running)

    def _schedule_running(self, step: VllmStep, budget: int, threshold: int, held: bool) -> int:
        """Schedule running requests. Return the tokens that are left of the budget."""
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            waits = self._has_all_output(request) or (held and request.is_prefill_chunk)
            tokens = 0 if waits else self._wanted(request, budget, threshold)
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
            self._prefills |= request.is_prefill_chunk
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

    def _schedule_waiting(self, step: VllmStep, budget: int, threshold: int, held: bool) -> None:
        skipped: list[VllmRequestState] = []
        while budget > 0 and self.waiting and len(self.running) < self.spec.max_num_seqs:
            request = self.waiting.peek_request()
            # Its output in flight comes first: to begin now could sample the same position twice.
            if request.num_stale_output_tokens:
                skipped.append(self.waiting.pop_request())
                continue
            hit = self.cached_tokens(request)
            tokens = request.num_tokens - hit
            if held and tokens > 1:
                break
            if 0 < threshold < tokens:
                tokens = threshold
            tokens = min(tokens, budget)
            if self.plugin is not None:
                tokens = self.plugin.cap(request, tokens)
            if tokens == 0 or not self._admits(request, hit + tokens):
                break
            self._prefills |= request.num_tokens - hit > 1
            request.num_computed_tokens = hit
            self.waiting.pop_request()
            self.running.append(request)
            request.running = True
            self.recomputed_tokens += max(0, request.lost_tokens - hit)
            request.lost_tokens = 0
            self._take(step, request, tokens)
            budget -= tokens
        if not held:
            self._backlog = bool(self.waiting)
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
