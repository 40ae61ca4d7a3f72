"""One prompt through the engine: deltas of tokens in, pieces of visible text out."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Literal, cast

from headway.core.errors import OverloadedError, UnavailableError
from headway.runtime.engine.protocol import EngineClient, OutputDelta, SubmitRequest
from headway.serving.errors import ApiError, as_api_error
from headway.serving.generation_job import GenerationJob, TextOptions
from headway.serving.generation_record import GenerationRecord
from headway.serving.journaled_request import JournaledRequest
from headway.serving.logprobs import ScoredToken
from headway.serving.prompts import TokenPrompt
from headway.serving.stops import StopMatcher
from headway.serving.tokenizer import ModelTokenizer


@dataclass(frozen=True, slots=True)
class TextPiece:
    """What one delta adds to the answer. `finish` is set on the last one; `stop_reason` is the string or token id."""

    text: str
    tokens: tuple[int, ...]
    scored: tuple[ScoredToken, ...] = ()
    finish: Literal["stop", "length"] | None = None
    stop_reason: str | int | None = None

    @property
    def visible(self) -> bool:
        """Whether a client gets it: some pieces hold text back that may become a stop string."""
        return bool(self.tokens or self.text or self.finish is not None)


async def generate(
    engine: EngineClient,
    tokenizer: ModelTokenizer,
    job: GenerationJob,
    prompt: TokenPrompt,
    engine_id: str,
    record: GenerationRecord,
    journaled: JournaledRequest | None = None,
    index: int = 0,
) -> AsyncGenerator[TextPiece, None]:
    """Run one prompt and yield its pieces; the last has `finish`.

    journaled: the request's entry in the journal, in which the prompt has `index`: output from before a restart comes
    first, and what follows is written down before it is sent. Closing this generator early aborts the request in the
    engine, and so does a stop string that matches. Raises ApiError when the engine ends the request for a reason of its
    own.
    """
    assembler = AnswerAssembler(tokenizer, job.text)
    earlier = () if journaled is None else journaled.emitted_before(index)
    for delta in earlier:
        record.resume(delta)
        piece = assembler.feed(delta)
        if piece.visible:
            yield piece
        if piece.finish is not None:
            record.finish(piece.finish)
            return
    submit = _submission(job, prompt, engine_id, journaled, earlier)
    # The protocol promises an iterator that can be closed early; closing is what tells the engine to abort.
    deltas = cast("AsyncGenerator[OutputDelta, None]", engine.generate(submit, prompt.data))
    try:
        async with aclosing(deltas):
            async for delta in deltas:
                _observe(delta, job, record)
                if journaled is not None:
                    journaled.write(index, delta)
                piece = assembler.feed(delta)
                if piece.finish is not None:
                    record.finish(piece.finish)
                if piece.visible:
                    yield piece
                if piece.finish is not None:
                    return
        raise ApiError(500, "the engine ended the request without a finish reason")
    except (OverloadedError, UnavailableError) as error:
        if record.first_token_s is None:
            record.reject(as_api_error(error).status)
        record.finish("error")
        raise
    except Exception:
        record.finish("error")
        raise
    finally:
        record.finish("abort")  # the first reason given stays: this one is for a client that left


def _submission(
    job: GenerationJob,
    prompt: TokenPrompt,
    engine_id: str,
    journaled: JournaledRequest | None,
    earlier: Sequence[OutputDelta],
) -> SubmitRequest:
    """The engine's request. earlier: output from before a restart, which the engine takes for computed."""
    return SubmitRequest(
        id=engine_id,
        prompt_tokens=prompt.tokens,
        params=job.params,
        received_s=job.received_s,
        slo=job.slo,
        priority=job.priority,
        timeout_s=job.timeout_s,
        resubmitted=journaled is not None and journaled.resumes,
        output=tuple(token for delta in earlier for token in delta.tokens),
    )


def _observe(delta: OutputDelta, job: GenerationJob, record: GenerationRecord) -> None:
    """Count a delta. Raises ApiError where it ends the request without an answer."""
    record.observe(delta)
    if delta.finish in ("abort", "timeout", "error"):
        record.finish(delta.finish)
        raise _failure(delta, job)


class AnswerAssembler:
    """The state of one answer: detokeniser, stop strings, and log-probabilities that wait for their text to show."""

    def __init__(self, tokenizer: ModelTokenizer, options: TextOptions) -> None:
        self._detokeniser = tokenizer.detokeniser(skip_special_tokens=options.skip_special_tokens)
        self._matcher = StopMatcher(options.stops, include=options.include_stop)
        self._min_tokens = options.min_tokens
        self._stops = bool(options.stops)
        self._tokens = 0
        self._raw = 0
        self._shown = 0
        self._waiting: deque[ScoredToken] = deque()

    def feed(self, delta: OutputDelta) -> TextPiece:
        """The piece that this delta adds; tokens after the end of a stop string are dropped."""
        parts: list[str] = []
        used = 0
        for place, token in enumerate(delta.tokens):
            used += 1
            self._tokens += 1
            if delta.logprobs is not None and place < len(delta.logprobs):
                self._waiting.append(ScoredToken(token, delta.logprobs[place], self._raw))
            parts.append(self._show(self._detokeniser.feed(token)))
            if self._matcher.matched is not None:
                break
        finish: Literal["stop", "length"] | None = None
        if delta.finish is not None and self._matcher.matched is None:
            parts.append(self._show(self._detokeniser.flush()))
        if self._matcher.matched is not None:
            finish = "stop"
        elif delta.finish is not None:
            parts.append(self._matcher.flush())
            finish = "stop" if delta.finish == "stop" else "length"
        text = "".join(parts)
        self._shown += len(text)
        complete = finish is not None and self._matcher.matched is None
        scored = self._release(everything=complete or not self._stops)
        reason = self._matcher.matched if self._matcher.matched is not None else delta.stop_token
        return TextPiece(text, delta.tokens[:used], scored, finish, reason if finish == "stop" else None)

    def _show(self, text: str) -> str:
        self._raw += len(text)
        return self._matcher.feed(text) if self._tokens >= self._min_tokens else text

    def _release(self, everything: bool) -> tuple[ScoredToken, ...]:
        ready = []
        while self._waiting and (everything or self._waiting[0].offset < self._shown):
            ready.append(self._waiting.popleft())
        return tuple(ready)


def _failure(delta: OutputDelta, job: GenerationJob) -> ApiError:
    if delta.finish == "timeout":
        limit = f" within {job.timeout_s:g} s" if job.timeout_s is not None else " in time"
        return ApiError(504, f"the request was not finished{limit}; {delta.error or 'ask for less or allow more time'}")
    if delta.finish == "abort":
        return ApiError(503, delta.error or "the engine aborted the request", headers={"Retry-After": "1"})
    if delta.param is not None:
        return ApiError(400, delta.error or "the engine refused the request", delta.param)
    return ApiError(500, delta.error or "the engine failed on this request")
