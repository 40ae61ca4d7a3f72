"""Answering a generation request, streamed or whole: from the engine's token deltas to pieces of visible text with
log-probabilities.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, Protocol, TypeVar, cast

import msgspec
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response

from headway.core.errors import OverloadedError, UnavailableError
from headway.core.request import TokenLogprobs
from headway.runtime.engine.protocol import EngineClient, OutputDelta, SubmitRequest
from headway.serving.access import RequestOwner
from headway.serving.context import ServerContext, context
from headway.serving.errors import ApiError, as_api_error, engine_id, json_response, server_ending_error
from headway.serving.jobs import GenerationJob, Parse, TextOptions, TokenPrompt
from headway.serving.journal import JournaledRequest, Kind
from headway.serving.metrics import GenerationRecord
from headway.serving.text import StopMatcher
from headway.serving.tokenizer import ModelTokenizer
from headway.serving.transport import DONE, ActiveTasks, SseResponse, cancel_all, client_gone, event, merged

_LOWEST = -9999.0
_PART = 512
"""Tokens that are encoded at once: some milliseconds."""


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """One token of the answer with its log-probabilities."""

    token: int
    logprobs: TokenLogprobs | None
    """None: the first token of a prompt, which nothing predicts."""
    offset: int
    """Start of its text in the answer, in characters."""


def completion_logprobs(scored: Sequence[ScoredToken], tokenizer: ModelTokenizer) -> dict[str, Any]:
    """Return the format of /v1/completions: parallel arrays; alternatives as an object of text to log-probability."""
    return {
        "tokens": [_label(item.token, tokenizer) for item in scored],
        "token_logprobs": [item.logprobs and _finite(item.logprobs.logprob) for item in scored],
        "top_logprobs": [
            item.logprobs and {_label(token, tokenizer): _finite(value) for token, value in item.logprobs.top}
            for item in scored
        ],
        "text_offset": [item.offset for item in scored],
    }


def prompt_logprobs(scored: Sequence[ScoredToken], tokenizer: ModelTokenizer) -> msgspec.Raw:
    """Return vLLM's form of a prompt's log-probabilities: for each token an object by id, the token's own first.

    As JSON, encoded in parts: an encoder holds the interpreter's lock from first byte to last.
    """
    parts = [
        msgspec.json.encode(_prompt_entries(scored[at : at + _PART], tokenizer))[1:-1]
        for at in range(0, len(scored), _PART)
    ]
    return msgspec.Raw(b"[" + b",".join(parts) + b"]")


def _prompt_entries(scored: Sequence[ScoredToken], tokenizer: ModelTokenizer) -> list[dict[str, Any] | None]:
    found: list[dict[str, Any] | None] = []
    for item in scored:
        if item.logprobs is None:
            found.append(None)
            continue
        values = {item.token: item.logprobs.logprob, **dict(item.logprobs.top)}
        found.append(
            {
                str(token): {"logprob": _finite(value), "decoded_token": _label(token, tokenizer)}
                for token, value in values.items()
            }
        )
    return found


def chat_logprobs(scored: Sequence[ScoredToken], tokenizer: ModelTokenizer) -> dict[str, Any]:
    """Return the format of /v1/chat/completions: one entry per token with its bytes, alternatives likewise."""
    content = []
    for item in scored:
        if item.logprobs is None:
            continue
        entry = _entry(item.token, item.logprobs.logprob, tokenizer)
        entry["top_logprobs"] = [_entry(token, value, tokenizer) for token, value in item.logprobs.top]
        content.append(entry)
    return {"content": content}


def _entry(token: int, logprob: float, tokenizer: ModelTokenizer) -> dict[str, Any]:
    return {
        "token": _label(token, tokenizer),
        "logprob": _finite(logprob),
        "bytes": list(tokenizer.token_bytes(token)),
    }


def _label(token: int, tokenizer: ModelTokenizer) -> str:
    """Return the token's text; without a tokenizer, its id. Bytes that are not UTF-8 by themselves are escaped."""
    if not tokenizer.has_text:
        return f"token_id:{token}"
    data = tokenizer.token_bytes(token)
    try:
        # A token may hold a part of a character, which JSON text cannot.
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(value: float) -> float:
    """Return the value with -9999 as lower bound: JSON has no infinity for an impossible token."""
    return max(_LOWEST, value)


@dataclass(frozen=True, slots=True)
class TextPiece:
    """What one delta adds to the answer."""

    text: str
    """Text that can be shown now; it may lag behind `tokens`."""
    tokens: tuple[int, ...]
    scored: tuple[ScoredToken, ...] = ()
    """Log-probabilities of tokens whose text has been shown."""
    prompt_scored: tuple[ScoredToken, ...] | None = None
    """The prompt's tokens, on the first piece of a request that asks for their log-probabilities."""
    finish: Literal["stop", "length"] | None = None
    """Set on the last piece only."""
    stop_reason: str | int | None = None
    """The stop string or the token id that ended the answer, where one did."""

    @property
    def visible(self) -> bool:
        """Whether the piece is sent: a piece is empty while its text may still become part of a stop string."""
        return bool(self.tokens or self.text or self.finish is not None)

    def with_scores(self, scores: Sequence[TokenLogprobs] | None) -> TextPiece:
        """Return an opening with the log-probabilities of the prompt's tokens from the second on.

        Without them it is the prompt's text alone.
        """
        if self.prompt_scored is None:
            return self
        if scores is None:
            raise ValueError("the engine did not report the prompt's log-probabilities")
        # The first token has none.
        found = (None, *scores)
        scored = tuple(replace(one, logprobs=each) for one, each in zip(self.prompt_scored, found, strict=True))
        return replace(self, prompt_scored=scored, scored=scored if self.scored else ())


def opening_of(tokenizer: ModelTokenizer, job: GenerationJob, prompt: TokenPrompt) -> TextPiece | None:
    """Return the piece before an answer, or None: the prompt, its tokens still without log-probabilities."""
    wanted = job.params.prompt_logprobs is not None
    if not (job.text.echo or wanted):
        return None
    decoder = tokenizer.detokeniser(skip_special_tokens=job.text.skip_special_tokens)
    parts: list[str] = []
    tokens: list[ScoredToken] = []
    at = 0
    for token in prompt.data.cast("i"):
        tokens.append(ScoredToken(token, None, at))
        parts.append(decoder.feed(token))
        at += len(parts[-1])
    parts.append(decoder.flush())
    text = "".join(parts) if job.text.echo else ""
    scored = tuple(tokens) if wanted else None
    return TextPiece(text, (), (scored or ()) if job.text.echo else (), prompt_scored=scored)


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


T = TypeVar("T")


@dataclass(slots=True)
class ChoiceAnswer:
    """One choice of an answer, collected from its pieces."""

    text: list[str] = field(default_factory=list)
    """Pieces of the text, in order."""
    tokens: list[int] = field(default_factory=list)
    scored: list[ScoredToken] = field(default_factory=list)
    prompt_scored: tuple[ScoredToken, ...] | None = None
    """The prompt's tokens, where their log-probabilities were asked for."""
    finish: Literal["stop", "length"] = "stop"
    stop_reason: str | int | None = None

    def joined(self) -> TextPiece:
        """Return all of it as one piece."""
        text, tokens, scored = "".join(self.text), tuple(self.tokens), tuple(self.scored)
        return TextPiece(text, tokens, scored, self.prompt_scored, self.finish, self.stop_reason)

    def add(self, piece: TextPiece) -> None:
        """Append the next piece."""
        self.text.append(piece.text)
        self.tokens.extend(piece.tokens)
        self.scored.extend(piece.scored)
        if piece.prompt_scored is not None:
            self.prompt_scored = piece.prompt_scored
        if piece.finish is not None:
            self.finish, self.stop_reason = piece.finish, piece.stop_reason


class AnswerFormat(Protocol):
    """JSON format of one endpoint's answers. One object per request, because formats keep state of their stream."""

    job: GenerationJob
    kind: Kind

    def chunks(self, index: int, piece: TextPiece) -> Sequence[dict[str, Any]]:
        """Return the stream's objects for one piece of choice `index`."""

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Return the last object of a stream that reports usage."""

    def whole(self, answers: Sequence[ChoiceAnswer], usage: dict[str, Any]) -> dict[str, Any]:
        """Return the non-streamed answer."""


@dataclass(frozen=True, slots=True)
class AnswerHeader:
    """Fields that every object of an answer repeats."""

    id: str
    created: int
    model: str

    @classmethod
    def of(cls, prefix: str, request_id: str, model: str) -> AnswerHeader:
        """Make a header with the present as `created`."""
        return cls(f"{prefix}-{request_id}", int(time.time()), model)

    def object(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """Wrap `choices` in an object of the API."""
        return {
            "id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices, **more
        }  # fmt: skip


MakeFormat = Callable[[GenerationJob, ServerContext, str], AnswerFormat]


async def answer(request: Request, parse: Parse[GenerationJob], make_format: MakeFormat) -> Response:
    """Admit, parse and run a request, and return its response.

    Raises HeadwayError of any kind; the application's exception handlers make the error object from it.
    """
    server = context(request)
    request_id: str = request.scope["headway.id"]
    owner: RequestOwner = request.scope["headway.owner"]
    # Holds the admission slot and the journal entry; released here on an error, else after the last byte.
    with ExitStack() as held:
        try:
            # Before the body is read; a slot is taken once it is there, so that half a body holds none.
            server.check_room(owner.id)
            job = await server.parse(request, parse)
            held.enter_context(server.admitted(owner.id))
        except Exception as error:
            server.metrics.rejected(as_api_error(error).status)
            raise
        records = [server.metrics.record(job, prompt.tokens) for prompt in job.prompts]
        request.scope["headway.log"]["records"] = records
        if server.tracer is not None:
            server.tracer.follow(request.headers, request_id, job, records)
        form = make_format(job, server, request_id)
        journaled = await _journaled(server, request, form, job)
        if journaled is not None:
            # Pushed after admission, so it runs first: the journal entry ends before the slot is free.
            held.callback(_end, server, journaled, records)
        pieces = run_job(server, job, request_id, records, journaled)
        if job.stream:
            # The response outlives this function: the slot is released when the stream has ended.
            release = held.pop_all()
            return SseResponse(_events(form, pieces, records), server.settings, server.active, release.close)
        answers = await _unless_client_leaves(request, _collect(pieces, len(job.prompts)), server.active)
        response = await _encoded(job, lambda: json_response(form.whole(answers, usage(job, records))))
        response.background = BackgroundTask(_close, held.pop_all())  # once it is sent
        return response


async def _journaled(
    server: ServerContext, request: Request, form: AnswerFormat, job: GenerationJob
) -> JournaledRequest | None:
    """Record the accepted request; None without a journal."""
    if server.journal is None:
        return None
    owner: RequestOwner = request.scope["headway.owner"]
    label, key = request.scope["headway.id"], request.scope["headway.key"]
    return await JournaledRequest.of(server.journal, label, key, owner.id, form.kind, job)


async def _close(held: ExitStack) -> None:
    """Close the stack on the event loop; starlette would run a plain function in a worker thread."""
    held.close()


def _end(server: ServerContext, journaled: JournaledRequest, records: Sequence[GenerationRecord]) -> None:
    """End the request in the journal, unless it is left to the next server."""
    if not is_unfinished(server, records):
        journaled.end()


def is_unfinished(server: ServerContext, records: Sequence[GenerationRecord]) -> bool:
    """Return whether the engine was lost for good before every prompt had its answer.

    Such a request is left to the next server. A drained engine has finished every prompt, even where the last bytes are
    still to be sent.
    """
    return server.engine.state == "lost" and any(record.reason not in ("stop", "length") for record in records)


def usage(job: GenerationJob, records: Sequence[GenerationRecord]) -> dict[str, Any]:
    """Return the API's token counts over all choices; cached tokens as of each prompt's first choice."""
    output = sum(record.output_tokens for record in records)
    prompt, cached = job.prompt_tokens, sum(record.cached_tokens for record in records[:: job.choices])
    return {
        "prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }  # fmt: skip


def run_job(
    server: ServerContext,
    job: GenerationJob,
    request_id: str,
    records: Sequence[GenerationRecord],
    journaled: JournaledRequest | None,
) -> AsyncGenerator[tuple[int, TextPiece], None]:
    """Yield the pieces of all prompts in order of arrival, each with its prompt's index."""
    names = [engine_id(request_id) for _ in records]
    if server.live is not None:
        for name, record in zip(names, records, strict=True):
            server.live.follow(name, record)
    return merged(
        [
            generate(server.engine, server.tokenizer, job, prompt, name, record, journaled, index)
            for index, (prompt, name, record) in enumerate(zip(job.prompts, names, records, strict=True))
        ]
    )


async def _events(
    form: AnswerFormat, pieces: AsyncGenerator[tuple[int, TextPiece], None], records: Sequence[GenerationRecord]
) -> AsyncGenerator[bytes, None]:
    async with aclosing(pieces):
        async for index, piece in pieces:
            yield await _encoded(form.job, partial(_piece_events, form, index, piece, records))
    if form.job.include_usage:
        yield event(form.usage_chunk(usage(form.job, records)))
    yield DONE


def _piece_events(form: AnswerFormat, index: int, piece: TextPiece, records: Sequence[GenerationRecord]) -> bytes:
    chunks = form.chunks(index, piece)
    if form.job.continuous_usage:
        counts = usage(form.job, records)
        chunks = [{**chunk, "usage": counts} for chunk in chunks]
    return b"".join(event(chunk) for chunk in chunks)


async def _encoded(job: GenerationJob, encode: Callable[[], T]) -> T:
    """Encode a part of an answer: in another thread where it has the log-probabilities of a long prompt."""
    long = job.params.prompt_logprobs is not None and job.prompt_tokens > LONG_TOKENS
    return await asyncio.to_thread(encode) if long else encode()


async def _collect(pieces: AsyncGenerator[tuple[int, TextPiece], None], count: int) -> list[ChoiceAnswer]:
    answers = [ChoiceAnswer() for _ in range(count)]
    async with aclosing(pieces):
        async for index, piece in pieces:
            answers[index].add(piece)
    return answers


async def _unless_client_leaves(
    request: Request, work: Coroutine[Any, Any, list[ChoiceAnswer]], active: ActiveTasks
) -> list[ChoiceAnswer]:
    """Await `work`; when the client disconnects first, cancel it, which aborts the request in the engine.

    Raises ApiError 499 for a client that left, UnavailableError when the server's shutdown cancelled `work`.
    """
    task = active.begin(work)
    watcher = asyncio.create_task(client_gone(request.receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        # Only `ActiveTasks.cancel` cancels this task before the wait returns.
        if task.cancelled():
            raise server_ending_error()
        if task.done():
            return task.result()
        request.scope["headway.log"]["client"] = "gone"
        raise ApiError(499, "the client left")
    finally:
        await cancel_all([task, watcher])
