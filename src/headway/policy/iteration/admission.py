"""Admission of waiting requests to KV: blocks that a request reserves, blocks that a long one leaves free, growth of
decodes, and what a cached block is worth.

A request enters with blocks for its whole prompt, or not at all. One whose blocks are not free is passed by later ones
until it has waited `ADMISSION_AGE_S`; then, of those behind it in the order, only small ones pass it, within the
headroom that large ones leave free for them. A request that computes lost KV again is passed by no new one.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Final, Protocol

from headway.core.errors import ConfigError, RequestError
from headway.core.request import Request
from headway.kv.block_manager import BlockManager, KvLease
from headway.kv.prefix_cache import PrefixCache
from headway.kv.prefix_index import EVICTION_POLICIES
from headway.perf.latency.base import LatencyModel
from headway.policy.iteration.config import SchedulerConfig
from headway.policy.iteration.requests import PrefillState, SequenceState


class PrefixLookup(Protocol):
    """Implemented by `kv.prefix_cache.PrefixCache`: what of the prompts of waiting requests is cached."""

    def drain_changes(self) -> list[tuple[str, int]]:
        """Return requests that hold no KV and whose number of cached tokens has changed, with that number."""

    def cached_tokens(self, request: str) -> int | None:
        """Return the cached tokens of a request that holds no KV; None for any other."""

    def computed_by(self, request: str) -> str | None:
        """Return the request that computes the next block of a waiting request's prompt, if any does."""

    def restored(self, request: str) -> bool:
        """Return whether the next block of a waiting request's prompt is being read from elsewhere."""


class KvPool(Protocol):
    """Implemented by `kv.block_manager.BlockManager`; a plug-in implements it over its engine's block pool.

    All methods are called within a decision, so each must take constant time. The owner of the pool releases a pledge
    when the request ends or loses its KV.
    """

    reserve_tokens: int
    """Tokens reserved beyond what is known, and grown by on demand."""
    answers_hold: int
    """Decisions for which an answer of `needed_blocks` about a request without KV may be used; 0: it is asked again."""

    @property
    def n_blocks(self) -> int:
        """Blocks of the pool, free or not."""

    @property
    def total_tokens(self) -> int:
        """Tokens that all blocks hold."""

    @property
    def free_blocks(self) -> int:
        """Blocks that are neither held by a request nor pledged to one."""

    @property
    def cache(self) -> PrefixLookup | None:
        """Cached prefixes that waiting requests would share; None: the pool looks no prompts up."""

    def needed_blocks(self, request_id: str, tokens: int) -> int:
        """Return how many more blocks a request needs for `tokens` tokens in all."""

    def held_blocks(self, request_id: str) -> int:
        """Blocks that a request holds or has been pledged; 0 for an unknown one."""

    def pledge(self, request_id: str, tokens: int, headroom_blocks: int = 0) -> bool:
        """Set aside blocks for `tokens` tokens of a request that is about to begin.

        False, and no change, if that would leave fewer than `headroom_blocks` free. An engine that allocates chunk by
        chunk must exclude blocks that are pledged and not yet allocated from `free_blocks`: otherwise several prefills
        in flight exhaust the pool and preempt each other."""


KV_HEADROOM: Final = 0.05
"""Share of the pool that large requests leave free. Those that take less than that are small."""
ADMISSION_AGE_S: Final = 10.0
"""A request that found no room for so long is passed by small ones only: it would otherwise wait for ever."""
MAX_BLOCKED: Final = 32
"""Most requests without room that one decision looks at: a bound on its time."""


def refuse_unservable(request: Request, total_tokens: int) -> None:
    """Raise RequestError when a request could not be served even alone, by a KV cache of so many tokens."""
    need = request.prompt_tokens + 1
    if need > total_tokens:
        raise RequestError(
            f"the prompt has {request.prompt_tokens} tokens and the KV cache holds {total_tokens}: "
            "shorten the prompt or start the server with more KV memory",
            "prompt",
        )
    # The last output token needs no KV (need - 1 + max_output - 1): even alone it would run out of blocks.
    if need - 2 + request.max_output_tokens > total_tokens:
        raise RequestError(
            f"{request.prompt_tokens} prompt and {request.max_output_tokens} output tokens do not fit the KV cache "
            f"of {total_tokens} tokens: ask for less output or give the server more KV memory",
            "max_tokens",
        )


class KvBlockAdmission:
    """Admission to one KV pool: the requests that hold KV, and one decision's walk through those that do not."""

    def __init__(self, config: SchedulerConfig, pool: KvPool) -> None:
        self._pool = pool
        self._reserve_tokens = pool.reserve_tokens
        self._total_tokens = pool.total_tokens
        self._headroom_blocks = int(KV_HEADROOM * pool.n_blocks) if config.leaves_headroom else 0
        # A request that other groups hold shards of was asked about in their decisions, which have counts of their own.
        self._answers_hold = pool.answers_hold if config.kv_parallel == 1 else 0
        # Requests that hold KV: prefills that have begun, and decodes. Changed by `hold` and `release` only.
        self.holders: dict[str, PrefillState] = {}
        # Whether a request had found no room for `ADMISSION_AGE_S`, by the last decision: KV is short.
        self.scarce = False
        # A large request of another group whose next shard has not fitted here for too long (`GroupedScheduler`).
        self.reserved_for: PrefillState | None = None
        self._max_holders = config.max_num_seqs
        # Decisions so far.
        self._decisions = 0
        # State of the current decision: free blocks, requests that found no room, and blocks that small requests may
        # take while a large one has waited too long (None: no such limit).
        self.free_blocks = 0
        self._blocked = 0
        self._spare: int | None = None
        # Whether no further request without KV enters in this decision.
        self.closed = False
        # Blocks of small holders in this decision, at most the headroom; None: to be counted.
        self._small: int | None = None

    # -- holders ------------------------------------------------------------------------------------------------

    def hold(self, state: PrefillState) -> None:
        """Note that a request holds KV."""
        state.holds_kv = True
        self.holders[state.request.id] = state
        self._small = None

    def release(self, request_id: str) -> None:
        """Note that a request holds no KV any more, if it did."""
        if self.holders.pop(request_id, None) is not None:
            self._small = None

    # -- one decision -------------------------------------------------------------------------------------------

    def decide(self, now: float, admits_new: bool) -> None:
        """Begin a decision: blocks in use may have changed since the last one."""
        self._decisions += 1
        self.free_blocks = self._pool.free_blocks
        self._small = None
        self._blocked = 0
        self.scarce = False
        self.closed = not admits_new or len(self.holders) >= self._max_holders
        self._spare = None if self.reserved_for is None else self._spare_blocks(self.reserved_for)

    def has_room(self, state: PrefillState, now: float) -> bool:
        """Whether a request without KV may begin: asked in order of urgency, once in a decision."""
        # Mostly the pool's last answer still holds, and is too many.
        blocks = self.blocks(state)
        free = self.free_blocks
        # An answer does not stand still for it.
        limited = self._spare is not None and not state.generated
        if limited and (self._large(blocks) or blocks > (self._spare or 0)):
            return self._refuse(state, now)
        if blocks > free or (self._headroom_blocks and blocks + self._headroom(state, blocks, free) > free):
            return self._refuse(state, now)
        if limited:
            self._spare = (self._spare or 0) - blocks
        return True

    def _refuse(self, state: PrefillState, now: float) -> bool:
        """Note that a request finds no room, and whether others may pass it. Returns False."""
        self._blocked += 1
        if state.skipped_since is None:
            state.skipped_since = now
        if state.generated:
            # A client reads its answer: whatever becomes free is for it.
            self.closed = True
        elif self._spare is None and now - state.skipped_since >= ADMISSION_AGE_S:
            self._spare = self._spare_blocks(state)
            self.scarce = True
        self.closed = self.closed or self._blocked >= MAX_BLOCKED or self._spare == 0
        return False

    def enter(self, state: PrefillState) -> bool:
        """Pledge KV to a request that is about to get its first tokens. False: there is not enough."""
        name, blocks = state.request.id, self.blocks(state)
        headroom = self.headroom(state, blocks) if self._headroom_blocks else 0
        if not self._pool.pledge(name, self._entry_tokens(state), headroom):
            state.asked_again = 0
            return False
        self.free_blocks = self._pool.free_blocks
        state.skipped_since = None
        self.hold(state)
        self.closed = self.closed or len(self.holders) >= self._max_holders
        return True

    def blocks(self, state: PrefillState) -> int:
        """Return how many free blocks a request would take to enter: the pool's answer while it holds."""
        if state.asked_again > self._decisions:
            return state.needed_blocks
        blocks = self._pool.needed_blocks(state.request.id, self._entry_tokens(state))
        state.needed_blocks, state.asked_again = blocks, self._decisions + self._answers_hold
        return blocks

    def headroom(self, state: PrefillState, blocks: int) -> int:
        """Return how many blocks must stay free if this request takes `blocks` more; 0 for a small one."""
        self._small = None
        return self._headroom(state, blocks, self._pool.free_blocks)

    def waits_for_prefix(self, state: PrefillState, ahead: Container[str]) -> bool:
        """Whether a request without KV had better begin in a later iteration, for the sake of its cached prefix.

        One of `ahead`, the more urgent requests, computes the prefix that it lacks; or that is being read from
        elsewhere; or KV that was pledged in this decision has evicted part of its hit, by which its work was sized."""
        cache, name = self._pool.cache, state.request.id
        if cache is None:
            return False
        hit = cache.cached_tokens(name)
        if hit is None:
            return False
        return hit != state.scheduled or cache.computed_by(name) in ahead or cache.restored(name)

    def _large(self, blocks: int) -> bool:
        return blocks > self._headroom_blocks

    def _headroom(self, state: PrefillState, blocks: int, free: int) -> int:
        """Return `headroom` beside `free` free blocks."""
        # In an empty pool there is nothing to leave headroom for: a prompt as large as the pool must fit.
        if not (self._large(blocks) and self.holders):
            return 0
        headroom = self._headroom_blocks
        left = free - blocks
        # Once skipped, blocks that small ones hold count towards the headroom: a stream of them must not keep it out.
        if state.skipped_since is not None and 0 <= left < headroom:
            return headroom - self._small_blocks()
        return headroom

    def _spare_blocks(self, state: PrefillState) -> int:
        """Return how many blocks small requests may still take ahead of `state`, which was skipped for too long.

        0: none may pass. While small ones hold no more than the headroom together, the large request enters no later
        than without them, since it leaves that headroom free anyway."""
        headroom, blocks = self._headroom_blocks, self.blocks(state)
        # If the request and the headroom exceed the whole pool, small ones beside it would delay it.
        concurrent = blocks + headroom <= self._pool.n_blocks
        return headroom - self._small_blocks() if self._large(blocks) and concurrent else 0

    def _small_blocks(self) -> int:
        """Return the blocks that small holders have together, at most the headroom."""
        if self._small is None:
            self._small, most = 0, self._headroom_blocks
            for name in self.holders:
                held = self._pool.held_blocks(name)
                if not self._large(held):
                    self._small += held
                    # More makes no difference: stop counting.
                    if self._small >= most:
                        self._small = most
                        break
        return self._small

    def _entry_tokens(self, state: PrefillState) -> int:
        """Return the tokens to reserve on entry: all known ones and the pool's reserve for output, within limits."""
        most = state.prompt + state.request.max_output_tokens
        # Of two at a time: machine code for it calls no function.
        tokens = min(min(state.known + self._reserve_tokens, most), min(self._total_tokens, state.limit))
        return max(1, tokens)


class KvGrowth:
    """Growth within one group's blocks."""

    def __init__(self, block_manager: BlockManager, admission: KvBlockAdmission) -> None:
        self._reserve_tokens = block_manager.reserve_tokens
        self._block_manager = block_manager
        self._admission = admission

    def grow(self, sequence: SequenceState) -> bool:
        """Grow a decode's lease, by the pool's `reserve_tokens` if possible, else by one token.

        False: no block, or the shard is full."""
        lease = sequence.lease
        assert lease is not None
        most = sequence.prompt + sequence.request.max_output_tokens
        need = sequence.computed + 1 - sequence.base
        if need > sequence.limit:
            return False
        # A larger step grows rarely; it stops at the request's own end and at the edge of its shard.
        wanted = max(need, min(need + self._reserve_tokens, most - sequence.base, sequence.limit))
        return self._block_manager.grow(lease, wanted) or self._block_manager.grow(lease, need)

    def next_shard(self, sequence: SequenceState, start: int) -> KvLease | None:
        """Reserve the next shard, from token `start` on, of a request that has filled its shard in another group.

        None: too few free blocks. A prefill reserves its known tokens up to the shard's limit, and leaves headroom; a
        decode leaves none."""
        most = sequence.prompt + sequence.request.max_output_tokens
        known = max(1, min(sequence.known, start + sequence.limit) - start)
        tokens = max(1, min(sequence.known + self._reserve_tokens, most, start + sequence.limit) - start)
        blocks = self._block_manager.blocks_for(tokens)
        headroom = 0 if sequence.decoding else self._admission.headroom(sequence, blocks)
        name = sequence.request.id
        # First with room for output, then for the known tokens only.
        return self._block_manager.reserve(name, tokens, headroom, start) or self._block_manager.reserve(
            name, known, headroom, start
        )


def make_prefix_cache(
    eviction: str, latency: LatencyModel, block_tokens: int, unused_blocks: int | None = None
) -> PrefixCache:
    """Return an empty cache with an order of eviction by name. Raises ConfigError for an unknown one."""
    if eviction not in EVICTION_POLICIES:
        raise ConfigError(f"unknown eviction policy {eviction!r}; known are {', '.join(EVICTION_POLICIES)}")

    def block_s(depth: int) -> float:
        return latency.rows_s(block_tokens) + latency.attention_s(block_tokens * (depth - 1), block_tokens)

    return PrefixCache(block_tokens, block_s if eviction == "cost" else None, unused_blocks)
