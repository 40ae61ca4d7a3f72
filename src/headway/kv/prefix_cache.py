"""Prefix cache of one block manager: which cached blocks each request would share, and which are pinned.

A request that waits holds nothing, so that cached blocks never keep others from being admitted: its hit grows as other
requests compute the same prefix, and shrinks as blocks are evicted. Only changes are looked at: each waiting request is
found under the node where its match ends and under the key that would extend it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

from headway.kv.allocator import Run, joined
from headway.kv.prefix_index import PrefixIndex, PrefixNode

K = TypeVar("K", bound=Hashable)


class _PrefixEntry:
    """One request's prefix. It waits, or holds KV."""

    __slots__ = ("computing", "counted", "keys", "prompt_tokens", "runs", "shareable", "tip", "used", "waiting")

    def __init__(self, keys: Sequence[Hashable], prompt_tokens: int, shareable: int, tip: PrefixNode) -> None:
        # Keys of its blocks, those of its prompt first.
        self.keys = keys
        self.prompt_tokens = prompt_tokens
        # Most blocks that it may take from the cache: the last token of the prompt is always computed.
        self.shareable = shareable
        # Where its match ends while it waits, else the last of its blocks in the index.
        self.tip = tip
        self.waiting = False
        # Whether the metrics have counted its look-up: a preempted request is not counted again.
        self.counted = False
        # (tip, epoch, blocks of the match that others use): memo of `in_use`.
        self.used: tuple[PrefixNode, int, int] | None = None
        # While it waits, the blocks of its match: kept, so that deciding that it begins takes less.
        self.runs: tuple[Run, ...] = ()
        # Key of the next block of a prompt that it is computing.
        self.computing: Hashable | None = None


class PrefixCache:
    """Cached prefixes of one pool, and the prefixes of its requests. Implements no allocation: `BlockManager` does."""

    def __init__(
        self, block_tokens: int, block_s: Callable[[int], float] | None = None, unused_blocks: int | None = None
    ) -> None:
        """`block_s`: see `PrefixIndex`. `unused_blocks`: most blocks to keep that no request uses; None: as many as the
        pool has room for."""
        self.index = PrefixIndex(block_s)
        self.unused_blocks = unused_blocks
        self.queried_tokens = 0
        """Prompt tokens of requests that were looked up when they got KV."""
        self.hit_tokens = 0
        """Tokens of these that were cached."""
        self._block_tokens = block_tokens
        # Names of prefixes that are being read from elsewhere.
        self._restores: set[str] = set()
        self._entries: dict[str, _PrefixEntry] = {}
        self._by_tip: dict[PrefixNode, set[str]] = {}
        self._by_next: dict[Hashable, set[str]] = {}
        # Requests that compute, by the key of the next block of their prompts.
        self._computing: dict[Hashable, str] = {}
        # Requests whose hit changed, in order; a dict for its order.
        self._changed: dict[str, None] = {}
        # Counts changes of which blocks are in use, except by extension of a request's own prefix.
        self._epoch = 0
        # Ends of pinned prefixes, oldest pin first.
        self._pins: dict[str, PrefixNode] = {}

    # -- waiting requests ---------------------------------------------------------------------------------------

    def register(
        self,
        request: str,
        keys: Sequence[Hashable],
        prompt_tokens: int,
        *,
        restores: bool = False,
        brings_kv: bool = False,
    ) -> int:
        """Look up a new request's prompt and return how many of its tokens are cached now.

        `keys`: of the prompt's full blocks, or of more blocks if its output is known; the list may grow with the
        answer, whose blocks are then cached too. `restores`: it is no request but a prefix that is about to be read
        from elsewhere: others wait for it, and it is not counted. `brings_kv`: it comes with its KV: it takes nothing
        and is not counted, and its blocks are cached. A request that is not registered neither shares blocks nor leaves
        any."""
        shareable = 0 if brings_kv else min(len(keys), (prompt_tokens - 1) // self._block_tokens)
        entry = _PrefixEntry(keys, prompt_tokens, shareable, self.index.root)
        self._entries[request] = entry
        if brings_kv:
            entry.counted = True
            return 0
        if restores:
            entry.counted = True
            self._restores.add(request)
        entry.tip = self.index.match(keys[:shareable])
        entry.runs = self.index.runs(entry.tip)
        self._watch(request, entry)
        return entry.tip.depth * self._block_tokens

    def forget(self, request: str) -> None:
        """Drop a request that has ended. Its blocks stay cached until they are evicted."""
        entry = self._entries.pop(request, None)
        if entry is not None:
            self._stop_computing(entry)
            if entry.waiting:
                self._unwatch(request, entry)
        self._changed.pop(request, None)
        self._restores.discard(request)

    def requeue(self, request: str) -> None:
        """Let a request wait again that has lost its KV; part of it may still be cached."""
        entry = self._entries.get(request)
        if entry is None or entry.waiting:
            return
        self._stop_computing(entry)
        entry.tip = self.index.match(entry.keys[: entry.shareable])
        entry.runs = self.index.runs(entry.tip)
        self._watch(request, entry)
        self._changed[request] = None

    def cached_tokens(self, request: str) -> int | None:
        """Return the tokens that a waiting request would share now. None: it is unknown or holds KV."""
        entry = self._entries.get(request)
        return entry.tip.depth * self._block_tokens if entry is not None and entry.waiting else None

    def drain_changes(self) -> list[tuple[str, int]]:
        """Return the waiting requests whose hit has changed since the last call, with their cached tokens."""
        if not self._changed:
            return []
        changed, self._changed = self._changed, {}
        return [(request, self.cached_tokens(request) or 0) for request in changed]

    def in_use(self, request: str) -> int:
        """Return how many blocks of a waiting request's match other requests use: they take no free block."""
        entry = self._entries.get(request)
        if entry is None or not entry.waiting or not self.index.in_use:
            return 0
        used = entry.used
        if used is not None and used[0] is entry.tip and used[1] == self._epoch:
            return used[2]
        blocks = self.index.used_blocks(entry.runs)
        entry.used = (entry.tip, self._epoch, blocks)
        return blocks

    def computed_by(self, request: str) -> str | None:
        """Return the request that computes the next block of a waiting request's prompt, if any does."""
        entry = self._entries.get(request)
        if entry is None or not entry.waiting or entry.tip.depth >= entry.shareable:
            return None
        return self._computing.get(entry.keys[entry.tip.depth])

    def restored(self, request: str) -> bool:
        """Return whether the next block of a waiting request's prompt is being read from elsewhere."""
        return bool(self._restores) and self.computed_by(request) in self._restores

    # -- pins ---------------------------------------------------------------------------------------------------

    @property
    def pinned(self) -> dict[str, int]:
        """Blocks of each pinned prefix, oldest pin first; blocks that several share count in each."""
        return {name: tip.depth for name, tip in self._pins.items()}

    def pin(self, name: str, keys: Sequence[Hashable]) -> int:
        """Keep the cached prefix of a text from eviction until `unpin`. Return how many of its blocks are cached."""
        tip = self._pins[name] = self.hold(keys)
        return tip.depth

    def unpin(self, name: str) -> bool:
        """Let a pinned prefix be evicted. False: there is none of this name."""
        tip = self._pins.pop(name, None)
        if tip is not None:
            self.end(tip)
        return tip is not None

    # -- requests that hold KV ----------------------------------------------------------------------------------

    def begin(self, request: str) -> PrefixNode | None:
        """Hold the match of a request that is about to get KV. None: it takes part in no sharing."""
        entry = self._entries.get(request)
        if entry is None:
            return None
        if entry.waiting:
            self._unwatch(request, entry)
        self._changed.pop(request, None)
        self._epoch += 1
        self.index.acquire(entry.tip, entry.runs)
        self._start_computing(request, entry)
        return entry.tip

    def shared_runs(self, request: str) -> tuple[Run, ...]:
        """Return the cached blocks with which a request that has just begun, begins."""
        return self._entries[request].runs

    def cancel(self, request: str) -> None:
        """Undo `begin` for a request that got no KV after all."""
        entry = self._entries[request]
        self._epoch += 1
        self._stop_computing(entry)
        self.index.release(entry.tip)
        self._watch(request, entry)

    def count(self, request: str) -> None:
        """Count the look-up of a request that got its KV, once a request."""
        entry = self._entries[request]
        if not entry.counted:
            entry.counted = True
            self.looked_up(entry.prompt_tokens, entry.tip.depth)

    def looked_up(self, prompt_tokens: int, blocks: int) -> None:
        """Count the look-up of a prompt of so many tokens, of which so many cached blocks are used."""
        self.queried_tokens += prompt_tokens
        self.hit_tokens += blocks * self._block_tokens

    def computed(self, request: str, tip: PrefixNode, tokens: int, blocks: Sequence[int]) -> PrefixNode:
        """Index the blocks of a request's first `tokens` tokens; `blocks`: those behind `tip`. Return its new tip.

        A block that is cached under the same key stays, and the request's own is freed with the request."""
        entry = self._entries.get(request)
        if entry is None:
            return tip
        full = min(tokens // self._block_tokens, len(entry.keys))
        if full <= tip.depth:
            return tip
        keys = entry.keys[tip.depth : full]
        before = len(self.index)
        end = self.index.extend(tip, keys, blocks[: len(keys)])
        # Blocks that were cached and unused are in use now.
        self._epoch += len(self.index) - before < len(keys)
        self.index.advance(tip, end)
        entry.tip = end
        self._stop_computing(entry)
        self._start_computing(request, entry)
        if self._by_next:
            for key in keys:
                for name in sorted(self._by_next.get(key, ())):
                    self._rematch(name)
        return end

    def hold(self, keys: Sequence[Hashable]) -> PrefixNode:
        """Keep what is cached of a prompt that is not registered from eviction until `end`."""
        tip = self.index.match(keys)
        self._epoch += 1
        self.index.acquire(tip)
        return tip

    def end(self, tip: PrefixNode) -> None:
        """Let go of a prefix whose request's lease is freed, or that was held."""
        self._epoch += 1
        self.index.release(tip)

    def evict(self) -> int | None:
        """Remove the block of the lowest rank and return its number. None: all are in use."""
        node = self.index.evict()
        if node is None:
            return None
        for name in sorted(self._by_tip.get(node, ())):
            entry = self._entries[name]
            self._unwatch(name, entry)
            assert node.parent is not None
            entry.tip, (first, count) = node.parent, entry.runs[-1]
            entry.runs = (*entry.runs[:-1], (first, count - 1)) if count > 1 else entry.runs[:-1]
            self._watch(name, entry)
            self._changed[name] = None
        return node.block

    def check(self) -> None:
        """Raise InvariantError unless the index agrees with itself."""
        self.index.check()

    def _start_computing(self, request: str, entry: _PrefixEntry) -> None:
        depth = entry.tip.depth
        if depth < entry.shareable and entry.keys[depth] not in self._computing:
            entry.computing = entry.keys[depth]
            self._computing[entry.computing] = request

    def _stop_computing(self, entry: _PrefixEntry) -> None:
        if entry.computing is not None:
            del self._computing[entry.computing]
            entry.computing = None

    def _rematch(self, request: str) -> None:
        entry = self._entries[request]
        self._unwatch(request, entry)
        known = entry.tip.depth
        entry.tip = self.index.match(entry.keys[: entry.shareable], entry.tip)
        entry.runs = joined(entry.runs, self.index.runs(entry.tip, known))
        self._watch(request, entry)
        self._changed[request] = None

    def _watch(self, request: str, entry: _PrefixEntry) -> None:
        entry.waiting = True
        self._by_tip.setdefault(entry.tip, set()).add(request)
        if entry.tip.depth < entry.shareable:
            self._by_next.setdefault(entry.keys[entry.tip.depth], set()).add(request)

    def _unwatch(self, request: str, entry: _PrefixEntry) -> None:
        entry.waiting = False
        _drop(self._by_tip, entry.tip, request)
        if entry.tip.depth < entry.shareable:
            _drop(self._by_next, entry.keys[entry.tip.depth], request)


def _drop(sets: dict[K, set[str]], key: K, name: str) -> None:
    """Remove a name from the set under a key, and the set with its last name."""
    names = sets[key]
    names.discard(name)
    if not names:
        del sets[key]
