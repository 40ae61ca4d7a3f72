"""The prefix cache of a simulated engine: the engine's own index and eviction, over keys that a trace gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from headway.core.errors import ConfigError
from headway.core.request import Request
from headway.kv.block_manager import BlockManager
from headway.kv.prefix_cache import PrefixCache
from headway.perf.latency.base import LatencyModel
from headway.policy.iteration.admission import make_prefix_cache
from headway.sim.workload import TraceRequest
from headway.sim.workload.traces import PromptText

INFINITE = 1 << 50
"""Tokens that no workload fills."""


@dataclass(frozen=True, kw_only=True)
class PrefixCacheSpec:
    """Size and eviction of the prefix cache of one instance."""

    tokens: int | None = None
    """Most tokens of cached KV that no request uses. None: as many as the KV pool has room for. More than the pool
    stands for memory beside it, from which KV is loaded at no cost."""
    eviction: str = "lru"


@dataclass(frozen=True)
class PrefixCacheUse:
    """Counters of one instance's prefix cache."""

    queried_tokens: int
    """Prompt tokens of the requests that got KV."""
    hit_tokens: int
    """Those of them that were cached."""
    kept_tokens: int
    """Cached at the end and not in use."""


def sum_of(one: PrefixCacheUse | None, other: PrefixCacheUse | None) -> PrefixCacheUse | None:
    """Return the counters of two caches together; None stands for no cache."""
    if one is None or other is None:
        return one or other
    return PrefixCacheUse(
        one.queried_tokens + other.queried_tokens,
        one.hit_tokens + other.hit_tokens,
        one.kept_tokens + other.kept_tokens,
    )


def make_block_manager(
    kv_tokens: int, block_tokens: int, spec: PrefixCacheSpec | None, latency: LatencyModel
) -> BlockManager:
    """Return the KV pool of an engine, with a prefix cache if `spec` has one of a size above 0."""
    if spec is None or spec.tokens == 0:
        return BlockManager(kv_tokens, block_tokens)
    kept = None if spec.tokens is None else spec.tokens // block_tokens
    cache = make_prefix_cache(spec.eviction, latency, block_tokens, kept)
    return BlockManager(kv_tokens, block_tokens, cache, max(0, (kept or 0) - kv_tokens // block_tokens))


class SimulatedPrefixes:
    """Look-ups of one engine's requests."""

    def __init__(self, block_manager: BlockManager, cache: PrefixCache) -> None:
        self._block_manager, self._cache = block_manager, cache
        self._unique = self._copies = 0

    def cached_tokens(self, source: TraceRequest) -> int:
        """Return how many tokens of a prompt are cached now, without registering it."""
        size = self._block_manager.block_tokens
        if source.text is None:
            return 0
        keys = source.text.cut(source.prompt_tokens).keys(size)
        return self._cache.index.match(keys[: (source.prompt_tokens - 1) // size]).depth * size

    def admit(self, request: Request, source: TraceRequest) -> Request:
        """Register a request and return it with the tokens that are cached now. `request` may have cached tokens: these
        were transferred here, and what it leaves is cached."""
        keys = self._text(request, source).keys(self._block_manager.block_tokens)
        brings = request.cached_tokens > 0
        cached = self._cache.register(request.id, keys, request.prompt_tokens, brings_kv=brings)
        return request if brings else replace(request, cached_tokens=cached)

    def begin_copy(self, source: TraceRequest, tokens: int) -> str | None:
        """Take blocks for the first `tokens` tokens of a prompt, which another instance sends: the request waits for
        them. Return the name of the copy, for `end_copy`; None: there are too few blocks, or the text is not known."""
        size = self._block_manager.block_tokens
        if source.text is None:
            return None
        keys = source.text.cut(source.prompt_tokens).keys(size)[: tokens // size]
        self._copies += 1
        # no request's id has this character
        name = f"\0copy-{self._copies}"
        self._cache.register(name, keys, len(keys) * size + 1, restores=True)
        if self._block_manager.reserve(name, len(keys) * size) is None:
            self._cache.forget(name)
            return None
        return name

    def end_copy(self, name: str) -> None:
        """Cache the blocks of a copy that has arrived."""
        lease = self._block_manager.lease(name)
        self._block_manager.note_computed(name, lease.tokens)
        self._block_manager.free(lease)
        self._cache.forget(name)

    def forget(self, request: str) -> None:
        """Drop a request that the scheduler refused."""
        self._cache.forget(request)

    def taken(self, request: Request) -> int:
        """Return the cached tokens with which a request began; where it was not looked up, those that it came with."""
        lease = self._block_manager.lease(request.id)
        return request.cached_tokens if lease.tip is None else lease.cached_tokens

    def use(self) -> PrefixCacheUse:
        return PrefixCacheUse(self._cache.queried_tokens, self._cache.hit_tokens, self._block_manager.cached_tokens)

    def _text(self, request: Request, source: TraceRequest) -> PromptText:
        """Return the text of prompt and answer; what the trace does not know of it is shared with no other request."""
        self._unique += 1
        total = request.prompt_tokens + max(1, source.output_tokens)
        return (source.text or PromptText(())).cut(total).and_unique(total, self._unique)


def prefixes_of(block_managers: Sequence[BlockManager], *, logged: bool) -> SimulatedPrefixes | None:
    """Return the look-ups of an engine; None without a prefix cache. `logged`: an event log is written of it.

    Raises ConfigError for what is not simulated with a prefix cache."""
    manager = block_managers[0]
    if manager.cache is None:
        return None
    if logged or len(block_managers) > 1:
        raise ConfigError("a prefix_cache is simulated with one KV group, and without an event log")
    return SimulatedPrefixes(manager, manager.cache)
