"""A request inside the engine: as it arrives (checks, rejections, cached tokens of its prompt), its output and when it
ends, the keys of what it generates, and pins.

`OutputTracker` is used wherever tokens are sampled: in a scheduler's iteration, or in a span of several instances.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from headway.core.batch import Batch, EmittedToken
from headway.core.errors import OverloadedError, RequestError, UnavailableError
from headway.core.request import SamplingParams
from headway.kv.block_manager import BlockManager
from headway.kv.text_keys import TextKeys
from headway.perf.latency.base import LatencyModel, PrefillCache
from headway.runtime.engine.protocol import (
    CacheChanges,
    EngineInfo,
    FinishReason,
    OutputDelta,
    Rejection,
    SubmitRequest,
)


class OutputTracker:
    """Counts a request's output and finds its end: end token, stop token, length.

    emitted: output tokens emitted before. room: output tokens that fit the model's context behind the prompt.
    """

    __slots__ = ("_room", "_stops", "cached_tokens", "emitted", "first_scheduled_s", "params", "saved_s")

    def __init__(self, params: SamplingParams, emitted: int, room: int, eos: tuple[int, ...]) -> None:
        self.params = params
        self._stops = frozenset((*params.stop_token_ids, *(() if params.ignore_eos else eos)))
        self._room = room
        self.emitted = emitted
        self.first_scheduled_s: float | None = None
        # See `OutputDelta`.
        self.cached_tokens, self.saved_s = 0, 0.0

    def take(self, emitted: EmittedToken, now: float) -> OutputDelta:
        """Return the delta of a token that was sampled at `now`; `finish` is set where it is the last."""
        # The sampler withholds end tokens until min_tokens; a stop token counts from then on only.
        stop = emitted.token in self._stops and self.emitted >= self.params.min_tokens
        # A stop token ends the output without being part of it.
        self.emitted += 0 if stop else 1
        finish: FinishReason | None = None
        if stop:
            finish = "stop"
        elif self.emitted >= min(self.params.max_tokens, self._room):
            finish = "length"
        logprobs = None if emitted.logprobs is None else (emitted.logprobs,)
        # Sent with the first token only: `emitted` is 1 then, or 0 if that token is a stop token.
        first = self.emitted + stop == 1
        return OutputDelta(
            id=emitted.request,
            tokens=() if stop else (emitted.token,),
            logprobs=() if stop and logprobs is not None else logprobs,
            prompt_logprobs=emitted.prompt_logprobs,
            finish=finish,
            stop_token=emitted.token if stop else None,
            emitted_s=now,
            first_scheduled_s=self.first_scheduled_s if first else None,
            cached_tokens=self.cached_tokens if first else 0,
            saved_s=self.saved_s if first else 0.0,
        )


class ScheduledOutput(OutputTracker):
    """Output state of a request inside the engine."""

    __slots__ = ("keys", "submit")

    def __init__(self, submit: SubmitRequest, info: EngineInfo, keys: TextKeys | None) -> None:
        super().__init__(
            submit.params, len(submit.output), info.max_model_len - submit.prompt_tokens, info.eos_token_ids
        )
        self.submit = submit
        # Keys of prompt and answer in the prefix cache; None: it takes no part in that.
        self.keys = keys


_PINNED_SHARE = 0.5
"""Most of the pool that pinned prefixes may hold together."""


class PrefixLookups:
    """Look-ups and pins in the cache of one KV pool; a pool without a cache has no hits."""

    def __init__(
        self,
        block_manager: BlockManager,
        latency: LatencyModel,
        t_target_s: float,
        headroom: float,
    ) -> None:
        """`headroom`: share of the pool that long requests leave free."""
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
            pinned = 0 if self._cache is None else sum(self._cache.pinned.values())
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

    def lost(self, now: float) -> None:
        """Note that all KV is lost, before the scheduler does: pins end, and `ended` says so."""
        names = [each.submit.id for each in self._computed]
        if self._cache is not None:
            names += self._cache.pinned
        self._computed.clear()
        self._unpinned += [_end(name, "its KV was lost with a worker", now) for name in names]

    def ended(self) -> list[OutputDelta]:
        """Return the ends of pins that were let go since the last call."""
        ends, self._unpinned = self._unpinned, []
        return ends

    # -- memory ---------------------------------------------------------------------------------------------------

    def _make_way(self, submit: SubmitRequest, cached: int) -> None:
        """Let go of pins, oldest first, until a request fits beside them: none waits for a pin's end."""
        if self._cache is None:
            return
        needed = self._blocks(submit) - cached // self._block_manager.block_tokens
        pinned = self._cache.pinned
        for name, blocks in pinned.items():
            if needed + sum(pinned.values()) <= self._room_blocks:
                return
            pinned = {**pinned, name: 0} if blocks else pinned
            self._cache.unpin(name)
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


RejectionError = RequestError | OverloadedError | UnavailableError


def rejection_delta(request_id: str, error: RejectionError, now: float) -> OutputDelta:
    """Return the last delta of a request that was not taken on because of `error`."""
    rejected: Rejection = "invalid"
    param, retry_after_s = None, 1.0
    match error:
        case OverloadedError():
            rejected, retry_after_s = "overloaded", error.retry_after_s
        case UnavailableError():
            rejected = "unavailable"
        case RequestError():
            param = error.param
    return OutputDelta(
        id=request_id,
        finish="error",
        error=str(error),
        rejected=rejected,
        param=param,
        retry_after_s=retry_after_s,
        emitted_s=now,
    )


def rejection_error(delta: OutputDelta) -> RejectionError | None:
    """Return the error that a delta stands for, or None if the request was accepted."""
    message = delta.error or "the engine refused the request"
    match delta.rejected:
        case None:
            return None
        case "overloaded":
            return OverloadedError(message, delta.retry_after_s)
        case "unavailable":
            return UnavailableError(message)
        case "invalid":
            return RequestError(message, delta.param)


def check_tokens(submit: SubmitRequest, prompt: memoryview, info: EngineInfo) -> int:
    """Check prompt and earlier output of a request against the model. Return the most output tokens that it may have,
    from its beginning. Raises RequestError."""
    if prompt.nbytes % 4:
        raise RequestError(f"the prompt frame has {prompt.nbytes} bytes, which are not whole token ids", "prompt")
    ids = np.frombuffer(prompt, dtype=np.int32)
    if ids.size == 0 or ids.size != submit.prompt_tokens:
        raise RequestError(f"the prompt frame holds {ids.size} tokens, not {submit.prompt_tokens}", "prompt")
    # At least one output token must fit behind the prompt.
    if ids.size + 1 > info.max_model_len:
        raise RequestError(
            f"the prompt has {ids.size} tokens; this model serves at most {info.max_model_len} tokens, output included",
            "prompt",
        )
    if int(ids.min()) < 0 or int(ids.max()) >= info.vocab_size:
        raise RequestError(f"token ids must be between 0 and {info.vocab_size - 1}", "prompt")
    # Output emitted by an earlier incarnation counts: the limits are those of the original request.
    most = min(submit.params.max_tokens, info.max_model_len - int(ids.size))
    emitted = len(submit.output)
    if emitted >= most or not all(0 <= token < info.vocab_size for token in submit.output):
        raise RequestError(f"{emitted} tokens cannot be the output so far of at most {most} tokens", "output")
    return int(most)
