"""The engine's use of the prefix cache: which tokens of a prompt are cached, and keys of what it generates."""

from __future__ import annotations

from headway.kv.block_manager import BlockManager
from headway.kv.prefix_index import TextKeys
from headway.perf.latency.base import LatencyModel
from headway.perf.latency.prefill_cache import PrefillCache
from headway.runtime.engine.protocol import SubmitRequest


class PrefixLookups:
    """Look-ups in the cache of one KV pool; a pool without a cache has no hits."""

    def __init__(self, block_manager: BlockManager, latency: LatencyModel, t_target_s: float) -> None:
        self._block_manager = block_manager
        self._prefill_times = PrefillCache(latency, t_target_s)

    def look_up(self, submit: SubmitRequest, prompt: memoryview) -> tuple[TextKeys | None, int]:
        """Register a prompt, if it may use the cache. Return its keys and how many of its tokens are cached now."""
        cache = self._block_manager.cache
        # Scores of the prompt need its logits, which cached KV has not.
        scored = submit.params.prompt_logprobs is not None
        if cache is None or not submit.prefix_cache or scored or submit.phase == "decode":
            return None, 0
        text = TextKeys(prompt, self._block_manager.block_tokens, submit.cache_salt)
        for token in submit.output:
            text.append(token)
        return text, cache.register(submit.id, text.keys, submit.prompt_tokens + len(submit.output))

    def forget(self, request: str) -> None:
        """Drop a request that the scheduler refused."""
        if self._block_manager.cache is not None:
            self._block_manager.cache.forget(request)

    def taken(self, request: str) -> tuple[int, float]:
        """Return the cached tokens with which a request began, and the seconds that they would have taken alone."""
        if request not in self._block_manager:
            return 0, 0.0
        tokens = self._block_manager.lease(request).cached_tokens
        return tokens, self._prefill_times.total_s(tokens)
