"""Generation for one prompt: the engine's token deltas in, pieces of visible text out."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Literal, cast

import msgspec

from headway.core.errors import OverloadedError, UnavailableError
from headway.runtime.engine.protocol import EngineClient, OutputDelta, SubmitRequest
from headway.serving.answer_pieces import TextPiece, opening_of
from headway.serving.errors import ApiError, as_api_error
from headway.serving.generation_job import GenerationJob, TextOptions
from headway.serving.generation_record import GenerationRecord
from headway.serving.journaled_request import JournaledRequest
from headway.serving.logprobs import ScoredToken
from headway.serving.prompts import TokenPrompt
from headway.serving.stops import StopMatcher
from headway.serving.tokenizer import ModelTokenizer

CONTINUED_TOKENS = 64
"""Last tokens of a prompt among which its answer's decoder looks for those with text."""
LONG_TOKENS = 1024
"""Prompt tokens above which another thread makes what answers say of them."""


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

    journaled: the request's entry in the journal; index: the prompt's index in it. Output from before a restart is
    yielded first; new output is recorded before it is yielded. Closing this generator early, or a match of a stop
    string, aborts the request in the engine. Raises ApiError when the engine aborts, times out or fails.
    """
    # A long prompt's text takes a while to make.
    long = prompt.tokens > LONG_TOKENS and (job.text.echo or job.params.prompt_logprobs is not None)
    opening = (
        await asyncio.to_thread(opening_of, tokenizer, job, prompt) if long else opening_of(tokenizer, job, prompt)
    )
    # A completion continues the prompt's text: decoders drop a space before what is a text of its own.
    before = prompt.data.cast("i")[-CONTINUED_TOKENS:].tolist() if job.text.continues else ()
    assembler = AnswerAssembler(tokenizer, job.text, 0 if opening is None else len(opening.text), before)
    # Replay recorded output through the same assembler: stop strings and partial characters span the restart.
    earlier = () if journaled is None else journaled.emitted_before(index)
    for delta in earlier:
        record.resume(delta)
        piece = assembler.feed(delta)
        if piece.visible:
            yield piece
        if piece.finish is not None:
            record.finish(piece.finish)
            return
    submit = _submission(job, prompt, engine_id, journaled, earlier, index)
    # The protocol returns an iterator that can be closed early; closing it aborts the request in the engine.
    deltas = cast("AsyncGenerator[OutputDelta, None]", engine.generate(submit, prompt.data))
    try:
        async with aclosing(deltas):
            async for delta in deltas:
                delta = _observed(delta, job, record)
                if journaled is not None:
                    await journaled.write(index, delta)
                piece = assembler.feed(delta)
                if opening is not None:
                    scores = delta.prompt_logprobs
                    yield await asyncio.to_thread(opening.with_scores, scores) if long else opening.with_scores(scores)
                    opening = None
                if piece.finish is not None:
                    record.finish(piece.finish)
                # The record is finished before the yield: a client that leaves at the yield must not count as an abort.
                if piece.visible:
                    yield piece
                if piece.finish is not None:
                    return
        raise ApiError(500, "the engine ended the request without a finish reason")
    except (OverloadedError, UnavailableError) as error:
        # Refused by the engine before any output: counted as a rejection. `finish` is then a no-op.
        if record.first_token_s is None:
            record.reject(as_api_error(error).status)
        record.finish("error")
        raise
    except Exception:
        record.finish("error")
        raise
    finally:
        record.finish("abort")  # a no-op after any other reason: only a client that left reaches this one first


def _submission(
    job: GenerationJob,
    prompt: TokenPrompt,
    engine_id: str,
    journaled: JournaledRequest | None,
    earlier: Sequence[OutputDelta],
    index: int,
) -> SubmitRequest:
    """Build the engine's request. earlier: output from before a restart, which the engine does not sample again."""
    params, choice = job.params, index % job.choices
    # Further choices of a prompt continue streams of their own.
    if choice and params.seed is not None:
        params = msgspec.structs.replace(params, seed=params.seed + choice)
    return SubmitRequest(
        id=engine_id,
        prompt_tokens=prompt.tokens,
        params=params,
        received_s=job.received_s,
        slo=job.slo,
        priority=job.priority,
        timeout_s=job.timeout_s,
        cache_salt=job.cache_salt,
        prefix_cache=job.cache_prompt,
        resubmitted=journaled is not None and journaled.resumes,
        output=tuple(token for delta in earlier for token in delta.tokens),
    )


def _observed(delta: OutputDelta, job: GenerationJob, record: GenerationRecord) -> OutputDelta:
    """Add a delta to the record and return what of it is answered. Raises ApiError when it ends without an answer."""
    record.observe(delta)
    if delta.finish in ("abort", "timeout", "error"):
        record.finish(delta.finish)
        raise _failure(delta, job)
    if not job.text.prompt_only:
        return delta
    # Metrics count the token, which was computed; the answer's usage does not.
    record.output_tokens = 0
    return msgspec.structs.replace(
        delta, tokens=(), logprobs=None, stop_token=None, finish=None if delta.finish is None else "length"
    )


class AnswerAssembler:
    """State of one answer: detokeniser, stop strings, and log-probabilities whose text is not shown yet."""

    def __init__(
        self, tokenizer: ModelTokenizer, options: TextOptions, offset: int = 0, before: Sequence[int] = ()
    ) -> None:
        """offset: characters that the answer has before its first token; before: tokens whose text it continues."""
        self._detokeniser = tokenizer.detokeniser(skip_special_tokens=options.skip_special_tokens, before=before)
        self._matcher = StopMatcher(options.stops, include=options.include_stop)
        self._include = options.include_stop
        self._min_tokens = options.min_tokens
        self._stops = bool(options.stops)
        # Output tokens so far.
        self._tokens = 0
        # Characters detokenised, and characters shown; they differ by text held back for stop strings.
        self._raw = self._shown = offset
        # Log-probabilities of tokens whose first character is not shown yet, by ascending offset.
        self._waiting: deque[ScoredToken] = deque()

    def feed(self, delta: OutputDelta) -> TextPiece:
        """Return the piece that this delta adds; tokens after the end of a stop string are dropped."""
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
        # As in vLLM: the token that ended the answer is shown like a stop string, unless it is a special one.
        if self._include and delta.stop_token is not None and self._matcher.matched is None:
            parts.append(self._show(self._detokeniser.feed(delta.stop_token)))
        finish: Literal["stop", "length"] | None = None
        # A character left incomplete at the end may itself complete a stop string.
        if delta.finish is not None and self._matcher.matched is None:
            parts.append(self._show(self._detokeniser.flush()))
        if self._matcher.matched is not None:
            finish = "stop"
        elif delta.finish is not None:
            parts.append(self._matcher.flush())
            finish = "stop" if delta.finish == "stop" else "length"
        text = "".join(parts)
        self._shown += len(text)
        # After a matched stop string only tokens of shown text are reported; otherwise all of them.
        complete = finish is not None and self._matcher.matched is None
        scored = self._release(everything=complete or not self._stops)
        reason = self._matcher.matched if self._matcher.matched is not None else delta.stop_token
        stop_reason = reason if finish == "stop" else None
        return TextPiece(text, delta.tokens[:used], scored, finish=finish, stop_reason=stop_reason)

    def _show(self, text: str) -> str:
        """Pass text through the stop matcher, from the `min_tokens`-th token on."""
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
