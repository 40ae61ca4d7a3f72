"""A request's output so far, and when it ends: end token, stop token, length.

Used wherever tokens are sampled: in a scheduler's iteration or in a span of several instances.
"""

from __future__ import annotations

from headway.core.batch import EmittedToken
from headway.core.request import SamplingParams
from headway.kv.text_keys import TextKeys
from headway.runtime.engine.protocol import EngineInfo, FinishReason, OutputDelta, SubmitRequest


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
