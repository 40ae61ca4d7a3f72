"""vLLM's block pool for the iteration policy, less the blocks that half-done prefills will still allocate."""

from __future__ import annotations

from collections.abc import Callable


class ReservedKvPool:
    """Implements `policy.iteration.kv_pool.KvPool`.

    vLLM allocates chunk by chunk, so that several prefills in flight could run the pool dry and preempt each other:
    each is pledged what its whole prompt will take, and `free_blocks` is without it. A pledge shrinks as vLLM
    allocates (`settle`) and is dropped once the prompt is computed: decodes grow by vLLM's own rules.
    """

    answers_hold = 16
    """Asking vLLM looks a prompt up in its prefix cache, which changes meanwhile."""
    holders_grow = False
    cache: None = None
    """vLLM looks prompts up itself: it reports a hit when it first schedules the request."""

    def __init__(
        self,
        n_blocks: int,
        total_tokens: int,
        free: Callable[[], int],
        needed: Callable[[str, int], int],
        reserve_tokens: int,
    ) -> None:
        """`free`: blocks that vLLM could allocate now. `needed(request_id, tokens)`: how many of them a request would
        take, beside those that it has, for `tokens` tokens in all. `reserve_tokens`: of a block."""
        self.n_blocks = n_blocks
        self.total_tokens = total_tokens
        self.reserve_tokens = reserve_tokens
        self._free = free
        self._needed = needed
        # By request: tokens that its pledge is for, and blocks of it that vLLM has not allocated yet.
        self._tokens: dict[str, int] = {}
        self._open: dict[str, int] = {}
        self._open_sum = 0
        self._held: dict[str, int] = {}

    @property
    def free_blocks(self) -> int:
        """Blocks that are neither allocated nor pledged; never below 0."""
        return max(0, self._free() - self._open_sum)

    @property
    def pledged_blocks(self) -> int:
        """Blocks that half-done prefills will still take."""
        return self._open_sum

    def needed_blocks(self, request_id: str, tokens: int) -> int:
        """See `KvPool`."""
        return self._needed(request_id, tokens)

    def held_blocks(self, request_id: str) -> int:
        """Return the blocks pledged to a request; 0 without a pledge."""
        return self._held.get(request_id, 0)

    def pledge(self, request_id: str, tokens: int, headroom_blocks: int = 0) -> bool:
        """See `KvPool`."""
        needed = self._needed(request_id, tokens)
        if needed + headroom_blocks > self.free_blocks:
            return False
        self._tokens[request_id] = tokens
        self._held[request_id] = needed
        self._set_open(request_id, needed)
        return True

    def settle(self, request_id: str) -> None:
        """Shrink a pledge by the blocks that vLLM has allocated to the request since."""
        if request_id in self._tokens:
            self._set_open(request_id, max(0, self._needed(request_id, self._tokens[request_id])))

    def complete(self, request_id: str) -> None:
        """End the pledge of a request whose prompt is computed."""
        if self._tokens.pop(request_id, None) is not None:
            self._set_open(request_id, 0)
            del self._open[request_id]

    def drop(self, request_id: str) -> None:
        """Forget a request that has ended, or whose blocks vLLM has preempted."""
        self.complete(request_id)
        self._held.pop(request_id, None)

    def _set_open(self, request_id: str, blocks: int) -> None:
        self._open_sum += blocks - self._open.get(request_id, 0)
        self._open[request_id] = blocks
