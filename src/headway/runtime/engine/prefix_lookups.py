"""The engine's use of the prefix cache: which tokens of a prompt are cached, keys of what it generates, and pins."""

from __future__ import annotations

from collections.abc import Iterable

from headway.kv.block_manager import BlockManager
from headway.kv.prefix_index import TextKeys
from headway.perf.latency.base import LatencyModel
from headway.perf.latency.prefill_cache import PrefillCache
from headway.runtime.engine.output_tracker import ScheduledOutput
from headway.runtime.engine.protocol import OutputDelta, SubmitRequest

_PINNED_SHARE = 0.5
"""Most of the pool that pinned prefixes may hold together."""


class PrefixLookups:
    """Look-ups and pins in the cache of one KV pool; a pool without a cache has no hits."""

    def __init__(self, block_manager: BlockManager, latency: LatencyModel, t_target_s: float, headroom: float) -> None:
        """`headroom`: share of the pool that long requests leave free."""
        self._block_manager = block_manager
        self._cache = block_manager.cache
        self._prefill_times = PrefillCache(latency, t_target_s)
        self._room_blocks = int((1.0 - headroom) * block_manager.n_blocks)
        # Requests to be pinned whose prompts have been computed.
        self._computed: list[ScheduledOutput] = []
        # Last deltas of pins that were let go.
        self._unpinned: list[OutputDelta] = []

    def look_up(self, submit: SubmitRequest, prompt: memoryview) -> tuple[TextKeys | None, int]:
        """Register a prompt, if it may use the cache. Return its keys and how many of its tokens are cached now."""
        # Scores of the prompt need its logits, which cached KV has not.
        scored = submit.params.prompt_logprobs is not None
        if self._cache is None or not submit.prefix_cache or scored or submit.phase == "decode":
            self._make_way(submit, 0)
            return None, 0
        text = TextKeys(prompt, self._block_manager.block_tokens, submit.cache_salt)
        for token in submit.output:
            text.append(token)
        cached = self._cache.register(submit.id, text.keys, submit.prompt_tokens + len(submit.output))
        self._make_way(submit, cached)
        return text, cached

    def forget(self, request: str) -> None:
        """Drop a request that the scheduler refused."""
        if self._cache is not None:
            self._cache.forget(request)

    def taken(self, request: str) -> tuple[int, float]:
        """Return the cached tokens with which a request began, and the seconds that they would have taken alone."""
        if request not in self._block_manager:
            return 0, 0.0
        tokens = self._block_manager.lease(request).cached_tokens
        return tokens, self._prefill_times.total_s(tokens)

    # -- pins ---------------------------------------------------------------------------------------------------

    def computed(self, live: ScheduledOutput, now: float) -> OutputDelta:
        """Note that a prompt to be pinned is computed, and return the delta that says so."""
        self._computed.append(live)
        return OutputDelta(
            id=live.submit.id, emitted_s=now, first_scheduled_s=live.first_scheduled_s,
            cached_tokens=live.cached_tokens, saved_s=live.saved_s,
        )  # fmt: skip

    def pin_computed(self, now: float, live: Iterable[ScheduledOutput]) -> list[OutputDelta]:
        """Pin the prompts that are computed. Return the ends of those for which there is no room.

        `live`: requests that may still wait for memory."""
        if not self._computed:
            return []
        computed, self._computed = self._computed, []
        needed = max((self._blocks(each.submit) for each in live), default=0)
        ends = []
        for each in computed:
            name, blocks = each.submit.id, self._blocks(each.submit)
            pinned = 0 if self._cache is None else sum(self._cache.pinned_blocks.values())
            fits = pinned + blocks <= min(_PINNED_SHARE * self._block_manager.n_blocks, self._room_blocks - needed)
            if self._cache is None or each.keys is None:
                ends.append(_end(name, "this engine keeps no prefixes", now))
            elif not fits:
                ends.append(_end(name, "its KV is cached but not pinned: there is too little memory", now))
            else:
                self._cache.pin(name, each.keys.keys)
        return ends

    def unpin(self, name: str) -> None:
        """Let go of a pin. Unknown names are ignored."""
        if self._cache is not None:
            self._cache.unpin(name)

    def drain_unpinned(self) -> list[OutputDelta]:
        """Return the ends of pins that made way for other requests since the last call."""
        ends, self._unpinned = self._unpinned, []
        return ends

    def _make_way(self, submit: SubmitRequest, cached: int) -> None:
        """Let go of pins, oldest first, until a request fits beside them: none waits for a pin's end."""
        if self._cache is None:
            return
        needed = self._blocks(submit) - cached // self._block_manager.block_tokens
        pinned = self._cache.pinned_blocks
        for name, blocks in pinned.items():
            if needed + sum(pinned.values()) <= self._room_blocks:
                return
            pinned = {**pinned, name: 0} if blocks else pinned
            self._cache.unpin(name)
            self._unpinned.append(_end(name, "its KV made way for a request that needs the memory", submit.received_s))

    def _blocks(self, submit: SubmitRequest) -> int:
        return self._block_manager.blocks_for(submit.prompt_tokens + submit.params.max_tokens)


def _end(name: str, why: str, now: float) -> OutputDelta:
    return OutputDelta(id=name, finish="abort", error=why, emitted_s=now)
