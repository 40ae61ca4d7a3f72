"""The engine's use of the prefix cache: which tokens of a prompt are cached, keys of what it generates, and pins."""

from __future__ import annotations

from collections.abc import Iterable

from headway.core.batch import Batch
from headway.kv.block_manager import BlockManager
from headway.kv.text_keys import TextKeys
from headway.perf.latency.base import LatencyModel
from headway.perf.latency.prefill_cache import PrefillCache
from headway.runtime.engine.output_tracker import ScheduledOutput
from headway.runtime.engine.protocol import CacheChanges, OutputDelta, SubmitRequest
from headway.runtime.kv_spill.spill import KvSpill

_PINNED_SHARE = 0.5
"""Most of the pool that pinned prefixes may hold together."""
_TOO_LITTLE_MEMORY = "its KV is cached but not pinned: there is too little memory"
_DISK_WAIT_S = 0.005
"""How long a loop with nothing to compute waits for the disk before it looks for messages."""


class PrefixLookups:
    """Look-ups and pins in the cache of one KV pool; a pool without a cache has no hits."""

    def __init__(
        self,
        block_manager: BlockManager,
        latency: LatencyModel,
        t_target_s: float,
        headroom: float,
        spill: KvSpill | None = None,
    ) -> None:
        """`headroom`: share of the pool that long requests leave free. `spill`: the pool's blocks on disk."""
        self._spill = spill
        self._block_manager = block_manager
        self._cache = block_manager.cache
        self._prefill_times = PrefillCache(latency, t_target_s)
        self._room_blocks = int((1.0 - headroom) * block_manager.n_blocks)
        # Requests to be pinned whose prompts have been computed.
        self._computed: list[ScheduledOutput] = []
        # Requests to be pinned whose prompts are still computed.
        self._preparing: set[str] = set()
        # Last deltas of pins that were let go.
        self._unpinned: list[OutputDelta] = []

    def look_up(self, submit: SubmitRequest, prompt: memoryview) -> tuple[TextKeys | None, int]:
        """Register a prompt, if it may use the cache. Return its keys and how many of its tokens are cached now."""
        # Scores of the prompt need its logits, which cached KV has not.
        scored, brings = submit.params.prompt_logprobs is not None, submit.phase == "decode"
        # A request that does not decode and has blocks all the same computes its prompt into these.
        staged = submit.id in self._block_manager and not brings
        if self._cache is None or not submit.prefix_cache or scored or staged:
            self._make_way(submit, 0)
            return None, 0
        text = TextKeys(prompt, self._block_manager.block_tokens, submit.cache_salt)
        for token in submit.output:
            text.append(token)
        known = submit.prompt_tokens + len(submit.output)
        cached = self._cache.register(submit.id, text.keys, known, brings_kv=brings)
        self._make_way(submit, cached)
        if submit.pin:
            self._preparing.add(submit.id)
        if self._spill is not None and not self._cache.computed_by(submit.id):
            free = self._block_manager.n_blocks - self._room_blocks
            self._spill.restore(text.keys, submit.prompt_tokens, self._prefill_times.total_s, free)
        return text, cached

    def forget(self, request: str) -> None:
        """Drop a request that the scheduler refused."""
        if self._cache is not None:
            self._cache.forget(request)

    @property
    def arrived(self) -> bool:
        """Whether blocks for which a prompt waits have been read from disk."""
        return self._spill is not None and self._spill.arrived

    def taken(self, request: str) -> tuple[int, float]:
        """Return the cached tokens with which a request began, and the seconds that they would have taken alone."""
        if request not in self._block_manager:
            return 0, 0.0
        tokens = self._block_manager.lease(request).cached_tokens
        return tokens, self.saved_s(tokens)

    def saved_s(self, tokens: int) -> float:
        """Return the seconds that a prompt's first tokens take alone."""
        return self._prefill_times.total_s(tokens)

    # -- pins ---------------------------------------------------------------------------------------------------

    def computed(self, live: ScheduledOutput, now: float) -> OutputDelta:
        """Note that a prompt to be pinned is computed, and return the delta that says so."""
        self._computed.append(live)
        self._preparing.discard(live.submit.id)
        return OutputDelta(
            id=live.submit.id, emitted_s=now, prefilled_tokens=live.submit.prompt_tokens,
            first_scheduled_s=live.first_scheduled_s, cached_tokens=live.cached_tokens, saved_s=live.saved_s,
        )  # fmt: skip

    def pin_computed(self, now: float, live: Iterable[ScheduledOutput], batch: Batch) -> list[OutputDelta]:
        """Pin the prompts that are computed. Return how far others are, and the ends of those without room.

        `live`: requests that may still wait for memory; `batch`: what was computed last."""
        ends = []
        if self._preparing:
            ends = [
                OutputDelta(id=chunk.request, emitted_s=now, prefilled_tokens=chunk.start + chunk.tokens)
                for part in batch.parts
                for chunk in part.prefills
                if chunk.request in self._preparing
            ]
        if not self._computed:
            return ends
        computed, self._computed = self._computed, []
        needed = max((self._blocks(each.submit) for each in live), default=0)
        for each in computed:
            name, blocks = each.submit.id, self._blocks(each.submit)
            pinned = 0 if self._cache is None else sum(self._cache.pins.blocks.values())
            fits = pinned + blocks <= min(_PINNED_SHARE * self._block_manager.n_blocks, self._room_blocks - needed)
            if self._cache is None or each.keys is None:
                ends.append(_end(name, "this engine keeps no prefixes", now))
            elif not fits and self._spill is None:
                ends.append(_end(name, _TOO_LITTLE_MEMORY, now))
            else:
                if fits:
                    self._cache.pins.pin(name, each.keys.keys)
                if self._spill is not None:
                    # Without a block that the first token of an answer, which is dropped, has filled.
                    prompt = each.submit.prompt_tokens // self._block_manager.block_tokens
                    self._spill.writer.keep(name, each.keys.keys[:prompt])
        return ends

    def unpin(self, name: str) -> None:
        """Let go of a pin. Unknown names are ignored."""
        if self._cache is not None:
            self._cache.pins.unpin(name)
        if self._spill is not None:
            self._spill.writer.release(name)

    def lost(self, now: float) -> None:
        """Note that all KV is lost, before the scheduler does: pins end, and `turn` says so."""
        names = [each.submit.id for each in self._computed]
        if self._cache is not None:
            names += self._cache.pins.blocks
        self._computed.clear()
        self._unpinned += [_end(name, "its KV was lost with a worker", now) for name in names]

    def turn(self, now: float) -> list[OutputDelta]:
        """Carry on with reading and writing KV on disk. Return the pins that made way, or are on disk, since then."""
        ends, self._unpinned = self._unpinned, []
        if self._spill is not None and self._spill.busy:
            for name in self._spill.turn():
                stored = self._spill.writer.stores(name)
                if stored or (self._cache is not None and name in self._cache.pins.blocks):
                    ends.append(OutputDelta(id=name, emitted_s=now, stored=stored))
                else:
                    self.unpin(name)
                    ends.append(_end(name, _TOO_LITTLE_MEMORY, now))
        return ends

    # -- disk -----------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether KV is being read from disk or written to it."""
        return self._spill is not None and self._spill.busy

    def save_evicted(self) -> None:
        """Copy blocks that the last decision has evicted, before its batch overwrites them."""
        if self._spill is not None:
            self._spill.writer.save_evicted()

    def wait(self) -> None:
        """Wait a moment for the disk, if it is all that there is to wait for."""
        if self._spill is not None:
            self._spill.wait(_DISK_WAIT_S)

    def close(self) -> None:
        """Finish what is being written."""
        if self._spill is not None:
            self._spill.close()

    @property
    def counts(self) -> dict[str, int]:
        """Statistics of the disk, by the names of `EngineStats`."""
        return {} if self._spill is None else self._spill.counts

    # -- memory ---------------------------------------------------------------------------------------------------

    def _make_way(self, submit: SubmitRequest, cached: int) -> None:
        """Let go of pins, oldest first, until a request fits beside them: none waits for a pin's end."""
        if self._cache is None:
            return
        needed = self._blocks(submit) - cached // self._block_manager.block_tokens
        pinned = self._cache.pins.blocks
        for name, blocks in pinned.items():
            if needed + sum(pinned.values()) <= self._room_blocks:
                return
            pinned = {**pinned, name: 0} if blocks else pinned
            self._cache.pins.unpin(name)
            # On disk it stays.
            if self._spill is not None and self._spill.writer.stores(name):
                continue
            self.unpin(name)
            self._unpinned.append(_end(name, "its KV made way for a request that needs the memory", submit.received_s))

    def _blocks(self, submit: SubmitRequest) -> int:
        return self._block_manager.blocks_for(submit.prompt_tokens + submit.params.max_tokens)


def take_changes(block_manager: BlockManager) -> CacheChanges | None:
    """Return which blocks were cached or evicted since the last call; None: none, or they are not noted."""
    cache = block_manager.cache
    if cache is None or not cache.index.changes:
        return None
    changes, cache.index.changes = cache.index.changes, {}
    keys: tuple[list[bytes], list[bytes]] = ([], [])
    for key, cached in changes.items():
        assert isinstance(key, bytes)
        keys[not cached].append(key)
    return CacheChanges(b"".join(keys[0]), b"".join(keys[1]))


def _end(name: str, why: str, now: float) -> OutputDelta:
    return OutputDelta(id=name, finish="abort", error=why, emitted_s=now)
