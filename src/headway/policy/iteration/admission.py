"""Which waiting requests get KV, and how much: what an entering request reserves, and what long ones leave free."""

from __future__ import annotations

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
    if need - 2 + request.max_output_tokens > total_tokens:  # alone it would run dry and wait for ever
        raise RequestError(
            f"{request.prompt_tokens} prompt and {request.max_output_tokens} output tokens do not fit the KV cache "
            f"of {total_tokens} tokens: ask for less output or give the server more KV memory",
            "max_tokens",
        )


class KvBlockAdmission:
    """Admission to one KV pool. Nothing is admitted in part: a request enters with all of its prompt pledged."""

    def __init__(self, config: SchedulerConfig, pool: KvPool) -> None:
        self._config = config
        self._pool = pool
        self._headroom_blocks = int(config.kv_headroom * pool.n_blocks)
        self.holders: dict[str, PrefillState] = {}  # requests that hold KV: prefills that have begun, and decodes

    def fits(self, state: PrefillState) -> bool:
        """Whether a request could enter now."""
        blocks = self.blocks(state)
        return blocks + self.headroom(state, blocks) <= self._pool.free_blocks

    def blocks(self, state: PrefillState) -> int:
        """Free blocks that a request would take to enter."""
        return self._pool.needed_blocks(state.request.id, self._entry_tokens(state))

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
        """Blocks that short requests may still enter with past this one, which has been skipped for too long: while
        they hold no more than the headroom together, it gets in as soon as it would without them. 0: none may pass."""
        headroom = self._headroom_blocks
        concurrent = self.blocks(state) + headroom <= self._pool.n_blocks
        return max(0, headroom - self._short_blocks()) if state.is_long and concurrent else 0

    def headroom(self, state: PrefillState, blocks: int) -> int:
        """Blocks that must stay free beside `blocks` new ones of this request. Once a long one has been skipped, what
        shorts hold counts towards the headroom that it leaves them."""
        if not (state.is_long and self.holders):
            return 0
        headroom = self._headroom_blocks
        left = self._pool.free_blocks - blocks
        if state.skipped_since is not None and 0 <= left < headroom:
            return max(0, headroom - self._short_blocks())
        return headroom

    def _entry_tokens(self, state: PrefillState) -> int:
        """Tokens that a request enters with room for: what is known, and some output, within its limits."""
        most = state.prompt + state.request.max_output_tokens
        return max(1, min(state.known + self._config.reserve_tokens, most, self._pool.total_tokens, state.limit))

    def _short_blocks(self) -> int:
        return sum(self._pool.held_blocks(name) for name, state in self.holders.items() if not state.is_long)
