"""Admission of waiting requests to KV: how many blocks a request reserves, and how many a long one must leave free."""

from __future__ import annotations

from collections.abc import Container

from headway.core.errors import RequestError
from headway.core.request import Request
from headway.policy.iteration.config import SchedulerConfig
from headway.policy.iteration.kv_pool import KvPool
from headway.policy.iteration.prefill import PrefillState


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
    """Admission to one KV pool. A request enters with blocks for its whole prompt pledged, or not at all."""

    def __init__(self, config: SchedulerConfig, pool: KvPool) -> None:
        self._config = config
        self._pool = pool
        self._total_tokens = pool.total_tokens
        self._headroom_blocks = int(config.kv_headroom * pool.n_blocks)
        # A request that other groups hold shards of was asked about in their decisions, which have counts of their own.
        self.answers_hold = pool.answers_hold if config.kv_parallel == 1 else 0
        # Requests that hold KV: prefills that have begun, and decodes. Changed by `hold` and `release` only.
        self.holders: dict[str, PrefillState] = {}
        # Decisions so far.
        self.decisions = 0
        # Free blocks of the pool in the current decision.
        self.free_blocks = 0
        # Blocks of short holders, at most the headroom; None: to be counted again.
        self._short: int | None = None

    @property
    def shares_prefixes(self) -> bool:
        """Whether the pool looks up prefixes, so that `waits_for_prefix` may be true."""
        return self._pool.cache is not None

    def decide(self) -> None:
        """Begin a decision: blocks in use may have changed since the last one."""
        self.decisions += 1
        self.free_blocks = self._pool.free_blocks
        if self._pool.holders_grow:
            self._short = None

    def hold(self, state: PrefillState) -> None:
        """Note that a request holds KV."""
        state.holds_kv = True
        self.holders[state.request.id] = state
        self._short = None

    def release(self, request_id: str) -> None:
        """Note that a request holds no KV any more, if it did."""
        if self.holders.pop(request_id, None) is not None:
            self._short = None

    def fits(self, state: PrefillState) -> bool:
        """Whether the pool has the blocks of a request, with the headroom it must leave, in this decision."""
        free, blocks = self.free_blocks, self.blocks(state)
        if not state.is_long:
            return blocks <= free
        return blocks <= free and blocks + self._headroom(state, blocks, free) <= free

    def all_fit(self, most_known: int) -> bool:
        """Whether in this decision the pool surely has room for any waiting request of at most so many known tokens.

        False where the pool cannot tell without being asked about each."""
        most = self._pool.most_blocks(min(most_known + self._config.reserve_tokens, self._total_tokens))
        return most is not None and most + self._headroom_blocks <= self.free_blocks

    def blocks(self, state: PrefillState) -> int:
        """Return how many free blocks a request would take to enter: the pool's answer while it holds."""
        if state.asked_again > self.decisions:
            return state.needed_blocks
        blocks = self._pool.needed_blocks(state.request.id, self._entry_tokens(state))
        state.needed_blocks, state.asked_again = blocks, self.decisions + self.answers_hold
        return blocks

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

    def enter(self, state: PrefillState) -> bool:
        """Pledge KV to a request that is about to get its first tokens. False: there is not enough."""
        tokens = self._entry_tokens(state)
        name = state.request.id
        # Only a long request leaves headroom: for others its blocks need not be counted.
        headroom = self.headroom(state, self.blocks(state)) if state.is_long else 0
        if not self._pool.pledge(name, tokens, headroom):
            state.asked_again = 0
            return False
        self.free_blocks = self._pool.free_blocks
        state.skipped_since = None
        self.hold(state)
        return True

    def spare_blocks(self, state: PrefillState) -> int:
        """Return how many blocks short requests may still take ahead of `state`, which was skipped for too long.

        0: none may pass. While shorts hold no more than the headroom together, the long request enters no later than
        without them, since it leaves that headroom free anyway."""
        headroom = self._headroom_blocks
        # If the request and the headroom exceed the whole pool, shorts beside it would delay it.
        concurrent = self.blocks(state) + headroom <= self._pool.n_blocks
        return headroom - self._short_blocks() if state.is_long and concurrent else 0

    def headroom(self, state: PrefillState, blocks: int) -> int:
        """Return how many blocks must stay free if this request takes `blocks` more; 0 for a short one."""
        if self._pool.holders_grow:
            self._short = None
        return self._headroom(state, blocks, self._pool.free_blocks)

    def _headroom(self, state: PrefillState, blocks: int, free: int) -> int:
        """Return `headroom` beside `free` free blocks."""
        # In an empty pool there is nothing to leave headroom for: a prompt as large as the pool must fit.
        if not (state.is_long and self.holders):
            return 0
        headroom = self._headroom_blocks
        left = free - blocks
        # Once skipped, blocks that shorts hold count towards the headroom: a stream of shorts must not keep it out.
        if state.skipped_since is not None and 0 <= left < headroom:
            return headroom - self._short_blocks()
        return headroom

    def _entry_tokens(self, state: PrefillState) -> int:
        """Return the tokens to reserve on entry: all known tokens, and `reserve_tokens` of output, within limits."""
        most = state.prompt + state.request.max_output_tokens
        # `total_tokens` does not change: a look-up through the pool is much of this.
        # Of two at a time: machine code for it calls no function.
        tokens = min(min(state.known + self._config.reserve_tokens, most), min(self._total_tokens, state.limit))
        return max(1, tokens)

    def _short_blocks(self) -> int:
        """Return the blocks that short holders have together, at most the headroom."""
        if self._short is None:
            self._short, most = 0, self._headroom_blocks
            for name, state in self.holders.items():
                if not state.is_long:
                    self._short += self._pool.held_blocks(name)
                    # More makes no difference: stop counting.
                    if self._short >= most:
                        self._short = most
                        break
        return self._short
