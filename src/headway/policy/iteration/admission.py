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
        self._headroom_blocks = int(config.kv_headroom * pool.n_blocks)
        # Requests that hold KV: prefills that have begun, and decodes.
        self.holders: dict[str, PrefillState] = {}

    def fits(self, state: PrefillState) -> bool:
        """Whether the pool has the blocks of a request, with the headroom it must leave."""
        blocks = self.blocks(state)
        return blocks + self.headroom(state, blocks) <= self._pool.free_blocks

    def blocks(self, state: PrefillState) -> int:
        """Return how many free blocks a request would take to enter."""
        return self._pool.needed_blocks(state.request.id, self._entry_tokens(state))

    def waits_for_prefix(self, state: PrefillState, ahead: Container[str]) -> bool:
        """Whether a request without KV had better begin in a later iteration, for the sake of its cached prefix.

        One of `ahead`, the more urgent requests, computes the prefix that it lacks; or KV that was pledged in this
        decision has evicted part of its hit, by which its work was sized."""
        cache, name = self._pool.cache, state.request.id
        if cache is None:
            return False
        hit = cache.cached_tokens(name)
        return hit is not None and (hit != state.scheduled or cache.computed_by(name) in ahead)

    def enter(self, state: PrefillState) -> bool:
        """Pledge KV to a request that is about to get its first tokens. False: there is not enough."""
        tokens = self._entry_tokens(state)
        name = state.request.id
        headroom = self.headroom(state, self._pool.needed_blocks(name, tokens))
        if not self._pool.pledge(name, tokens, headroom):
            return False
        state.skipped_since = None
        state.holds_kv = True
        self.holders[name] = state
        return True

    def spare_blocks(self, state: PrefillState) -> int:
        """Return how many blocks short requests may still take ahead of `state`, which was skipped for too long.

        0: none may pass. While shorts hold no more than the headroom together, the long request enters no later than
        without them, since it leaves that headroom free anyway."""
        headroom = self._headroom_blocks
        # If the request and the headroom exceed the whole pool, shorts beside it would delay it.
        concurrent = self.blocks(state) + headroom <= self._pool.n_blocks
        return max(0, headroom - self._short_blocks()) if state.is_long and concurrent else 0

    def headroom(self, state: PrefillState, blocks: int) -> int:
        """Return how many blocks must stay free if this request takes `blocks` more; 0 for a short one."""
        # In an empty pool there is nothing to leave headroom for: a prompt as large as the pool must fit.
        if not (state.is_long and self.holders):
            return 0
        headroom = self._headroom_blocks
        left = self._pool.free_blocks - blocks
        # Once skipped, blocks that shorts hold count towards the headroom: a stream of shorts must not keep it out.
        if state.skipped_since is not None and 0 <= left < headroom:
            return max(0, headroom - self._short_blocks())
        return headroom

    def _entry_tokens(self, state: PrefillState) -> int:
        """Return the tokens to reserve on entry: all known tokens, and `reserve_tokens` of output, within limits."""
        most = state.prompt + state.request.max_output_tokens
        return max(1, min(state.known + self._config.reserve_tokens, most, self._pool.total_tokens, state.limit))

    def _short_blocks(self) -> int:
        return sum(self._pool.held_blocks(name) for name, state in self.holders.items() if not state.is_long)
