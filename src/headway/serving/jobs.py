"""One HTTP request for generation, validated and ready to run: its prompts as token ids, and the prepared documents
that they begin with.

Built by `completions` and `chat`, run by `generate`.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import time
from array import array
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from headway.core.errors import HeadwayError, OverloadedError, RequestError
from headway.core.request import SamplingParams, Slo
from headway.runtime.engine.protocol import EngineInfo
from headway.serving.body_worker import BodyWorkers, MemoryFile
from headway.serving.errors import ApiError
from headway.serving.request_bodies import CompletionBody, GenerationBody, check_structure, decode, read_slo, text_field
from headway.serving.settings import ServerSettings
from headway.serving.tokenizer import ModelTokenizer


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids of one prompt."""

    data: memoryview
    """Little-endian int32, sent to the engine without another copy."""
    tokens: int
    """Number of ids: a quarter of the bytes of `data`."""

    @classmethod
    def of(cls, ids: Sequence[int]) -> TokenPrompt:
        """Make a prompt of ids that are known to be in the vocabulary."""
        buffer = ids if isinstance(ids, array) else array("i", ids)
        if sys.byteorder == "big":
            buffer.byteswap()
        return cls.holding(memoryview(buffer).cast("B"))

    @classmethod
    def holding(cls, data: bytes | memoryview) -> TokenPrompt:
        """Make a prompt of little-endian int32."""
        return cls(memoryview(data), len(data) // 4)

    def __reduce__(self) -> tuple[Callable[[bytes], TokenPrompt], tuple[bytes]]:
        """Pickle the ids as bytes."""
        return TokenPrompt.holding, (bytes(self.data),)


class PromptReader:
    """Reader of prompts: text, token ids or messages. Safe to use from several threads.

    vocab_size: exclusive bound of the token ids; max_prompts: most prompts in one request; most_tokens: longest prompt,
    in tokens.
    """

    def __init__(
        self, tokenizer: ModelTokenizer, vocab_size: int, max_prompts: int, most_tokens: int | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_prompts = max_prompts
        self._most_tokens = most_tokens

    @property
    def turn_end(self) -> tuple[int, ...]:
        """Tokens that end an assistant's message in the chat template; see `ModelTokenizer.turn_end`."""
        return tuple(token for token in self.tokenizer.turn_end if token < self._vocab_size)

    @property
    def most_ids(self) -> int:
        """Most token ids of all prompts of a request, and one more of each."""
        return sys.maxsize if self._most_tokens is None else self._max_prompts * (self._most_tokens + 1)

    def read(self, prompt: Any, *, add_special_tokens: bool) -> tuple[TokenPrompt, ...]:
        """Read text, token ids, or an array of either, as one or several prompts; none of them is empty.

        Raises RequestError.
        """
        if not isinstance(prompt, list):
            return (self._one(prompt, add_special_tokens, "prompt"),)
        # An array of neither arrays nor strings: one prompt of token ids (or an empty one).
        if not prompt or not isinstance(prompt[0], list | str):
            return (self._ids_prompt(prompt, "prompt"),)
        if len(prompt) > self._max_prompts:
            raise RequestError(
                f"'prompt' holds {len(prompt)} prompts; at most {self._max_prompts} are allowed", "prompt"
            )
        return tuple(self._one(item, add_special_tokens, f"prompt[{index}]") for index, item in enumerate(prompt))

    def chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool, variables: Mapping[str, Any] | None
    ) -> TokenPrompt:
        """Render messages with the model's chat template and tokenize them as one prompt.

        Special tokens are part of the template, so the tokenizer adds none. Raises RequestError.
        """
        text = self.tokenizer.render_chat(messages, add_generation_prompt=add_generation_prompt, variables=variables)
        ids = self._encode(text, "messages", add_special_tokens=False)
        if not ids:
            raise RequestError("the chat template makes an empty prompt of 'messages'", "messages")
        return TokenPrompt.of(ids)

    def token_ids(self, value: Any, name: str) -> array[int]:
        """Read an array of token ids; it may be empty. name: the body's field. Raises RequestError."""
        if not isinstance(value, list):
            raise RequestError(f"'{name}' must be an array of token ids", name)
        if self._most_tokens is not None and len(value) > self._most_tokens:
            raise RequestError(f"'{name}' holds {len(value)} token ids; at most {self._most_tokens} are allowed", name)
        return self._checked(value, name, name)

    def text(self, text: str, *, add_special_tokens: bool, label: str = "prompt") -> TokenPrompt:
        """Tokenize a text. label: what errors call it. Raises RequestError when empty."""
        ids = self._encode(text, "prompt", add_special_tokens=add_special_tokens) if text else None
        if not ids:
            raise RequestError(f"'{label}' is empty" + (": the text has no tokens" if text else ""), "prompt")
        return TokenPrompt.of(ids)

    def _one(self, prompt: Any, add_special_tokens: bool, label: str) -> TokenPrompt:
        if isinstance(prompt, list):
            return self._ids_prompt(prompt, label)
        if not isinstance(prompt, str):
            raise RequestError(f"'{label}' must be text or an array of token ids", "prompt")
        return self.text(prompt, add_special_tokens=add_special_tokens, label=label)

    def _encode(self, text: str, name: str, *, add_special_tokens: bool) -> array[int]:
        """Tokenize a text of the body's field `name`. Raises RequestError."""
        try:
            return self.tokenizer.encode_long(
                text, add_special_tokens=add_special_tokens, most_tokens=self._most_tokens
            )
        except RequestError as error:
            raise RequestError(str(error), name) from None

    def _ids_prompt(self, value: list[Any], label: str) -> TokenPrompt:
        ids = self._checked(value, "prompt", label)
        if not ids:
            raise RequestError(f"'{label}' is empty", "prompt")
        return TokenPrompt.of(ids)

    def _checked(self, value: list[Any], name: str, label: str) -> array[int]:
        """Return the ids as int32. Raises RequestError that names the first item that is none."""
        # The types first: in Python true is a number.
        if not value or (set(map(type, value)) == {int} and min(value) >= 0 and max(value) < self._vocab_size):
            return array("i", value)
        at = next(i for i, each in enumerate(value) if type(each) is not int or not 0 <= each < self._vocab_size)
        raise RequestError(f"'{label}' at [{at}] must be a token id in 0..{self._vocab_size - 1}", name)


class ContextRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One prepared document: either messages or a prompt."""

    id: str
    owner: str
    """A hash of its client's API key; empty without one."""
    model: str
    """The name by which its client called the model."""
    tokens: int
    created: float
    """Unix time."""
    ttl_s: float
    cache_salt: str | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    prompt: msgspec.Raw = msgspec.Raw(b"null")
    """JSON: text, or an array of token ids; null beside messages."""

    @property
    def left_s(self) -> float:
        """Seconds until its deadline."""
        return self.created + self.ttl_s - time.time()

    def before(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """Return a chat's messages behind the document's. Raises RequestError for a document that is a prompt."""
        if self.messages is None:
            raise RequestError(f"the context {self.id!r} is a prompt: name it in /v1/completions", "context_id")
        return (*self.messages, *messages)

    def continued(self, prompt: Any) -> Any:
        """Return a prompt behind the document's. Raises RequestError unless both are text, or both token ids."""
        if self.messages is not None:
            raise RequestError(f"the context {self.id!r} is of messages: name it in a chat", "context_id")
        first = msgspec.json.decode(self.prompt)
        if isinstance(first, str) != isinstance(prompt, str) or not _is_flat(prompt):
            kind = "text" if isinstance(first, str) else "an array of token ids"
            raise RequestError(f"'prompt' must be {kind}, as the context {self.id!r} is", "prompt")
        return first + prompt

    def check_salt(self, given: str | None) -> None:
        """Raise RequestError for a salt of the request that is not the document's."""
        if given is not None and given != self.cache_salt:
            raise RequestError(
                f"'cache_salt' is not that of the context {self.id!r}: leave it out, the context's is used",
                "cache_salt",
            )


def _is_flat(prompt: object) -> bool:
    """Whether a decoded prompt is one text or one array of numbers."""
    return isinstance(prompt, str) or (isinstance(prompt, list) and all(isinstance(each, int) for each in prompt))


_CLASS = re.compile(r"[A-Za-z0-9_.-]{1,32}")


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How output tokens become text."""

    stops: tuple[str, ...] = ()
    """Stop strings, without duplicates."""
    include_stop: bool = False
    """Whether the stop string that matched is part of the text."""
    skip_special_tokens: bool = True
    min_tokens: int = 0
    """Output tokens before which stop strings are not matched."""
    return_token_ids: bool = False
    echo: bool = False
    """Whether the answer begins with the prompt."""
    prompt_only: bool = False
    """Whether the answer has no tokens of the model's: the one that the engine computes is left out."""
    continues: bool = False
    """Whether the answer continues the prompt's text, as a completion does and a chat's does not."""
    prompt_logprobs: bool = False
    """Whether choices have the prompt's log-probabilities in a field of their own."""


@dataclass(frozen=True, slots=True)
class GenerationJob:
    """One HTTP request: one engine request for each prompt."""

    model: str
    prompts: tuple[TokenPrompt, ...]
    params: SamplingParams
    text: TextOptions
    slo: Slo
    priority: int
    timeout_s: float | None
    """Seconds after `received_s` at which the engine ends the request; None: no limit."""
    received_s: float
    """When the whole body had arrived, `time.monotonic()` seconds."""
    stream: bool
    include_usage: bool
    """Whether a stream ends with a chunk of token counts."""
    continuous_usage: bool = False
    """Whether every chunk of a stream has the token counts so far."""
    choices: int = 1
    """Choices of each prompt: `prompts` has each so many times, one after another."""
    cache_salt: str = ""
    """Prompts share cached prefixes with prompts of the same salt; the client's key is part of it."""
    cache_prompt: bool = True
    """Whether prompts may use the prefix cache."""
    request_class: str | None = None
    """The client's name for the kind of request, for metrics; None: by the prompt's length."""

    @property
    def prompt_tokens(self) -> int:
        """Number of prompt tokens over all prompts, each counted once."""
        return sum(prompt.tokens for prompt in self.prompts) // self.choices


@dataclass(frozen=True, slots=True)
class RequestContext:
    """Input of a request's parser besides the body."""

    headers: Mapping[str, str]
    received_s: float
    """When the whole body had arrived, `time.monotonic()` seconds."""
    info: EngineInfo
    settings: ServerSettings
    models: tuple[str, ...]
    """Names that the model is served by."""
    owner: str = ""
    """A hash of the client's API key; empty without one."""
    prepared: ContextRecord | None = None
    """The prepared document that the body names."""


class ContextNeededError(HeadwayError):
    """A body names the prepared document `name`, without which it cannot be read."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def prepared_context(body: GenerationBody, context: RequestContext) -> ContextRecord | None:
    """Return the prepared document that a request names; None where it names none. Raises ContextNeededError."""
    if body.context_id is None:
        return None
    if context.prepared is None:
        raise ContextNeededError(body.context_id)
    context.prepared.check_salt(body.cache_salt)
    return context.prepared


def build_job(
    body: GenerationBody,
    context: RequestContext,
    prompts: tuple[TokenPrompt, ...],
    params: SamplingParams,
    length_field: str | None,
) -> GenerationJob:
    """Build the job of a validated body. length_field: the body's field that limits the output, named in errors."""
    settings = context.settings
    # The smaller of the client's and the operator's limit: a client may shorten, never extend.
    limits = [limit for limit in (body.timeout_s, settings.request_timeout_s) if limit is not None]
    if len(prompts) * body.n > settings.max_prompts:
        asked = f"'n' times the number of prompts is {len(prompts) * body.n}"
        raise RequestError(f"{asked}; at most {settings.max_prompts} are allowed", "n")
    if body.stream_options is not None and not body.stream:
        raise RequestError("'stream_options' needs 'stream': true", "stream_options")
    return GenerationJob(
        model=body.model,
        prompts=tuple(prompt for prompt in prompts for _ in range(body.n)),
        params=fit_length(prompts, params, context.info, length_field),
        text=TextOptions(
            stops=body.stop,
            include_stop=body.include_stop_str_in_output,
            skip_special_tokens=body.skip_special_tokens,
            min_tokens=params.min_tokens,
            return_token_ids=body.return_token_ids,
            echo=getattr(body, "echo", False),
            continues=isinstance(body, CompletionBody),
            prompt_only=body.max_tokens == 0,
            prompt_logprobs=getattr(body, "prompt_logprobs", None) is not None,
        ),
        slo=read_slo(context.headers, body.slo, settings),
        priority=body.priority,
        timeout_s=min(limits, default=None),
        received_s=context.received_s,
        stream=body.stream,
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        continuous_usage=bool(body.stream_options and body.stream_options.continuous_usage_stats),
        choices=body.n,
        cache_salt=_salt(body, context),
        cache_prompt=body.cache_prompt,
        request_class=read_class(body.request_class),
    )


def _salt(body: GenerationBody, context: RequestContext) -> str:
    record = prepared_context(body, context)
    return salt_of(context.owner, body.cache_salt) if record is None else salt_of(record.owner, record.cache_salt)


def salt_of(owner: str, given: str | None) -> str:
    """Return the salt of a client's prompts in the prefix cache."""
    # A salt that a client makes up cannot begin with another's key: hashes have no "/".
    return f"{owner}/{given or ''}"


def read_class(given: str | None) -> str | None:
    """Return the request's class. Raises RequestError for a name that is no label."""
    if given is not None and not _CLASS.fullmatch(given):
        raise RequestError("'class' must be 1 to 32 letters, digits or any of _.-", "class")
    return given


def read_model(fields: Mapping[str, Any], models: tuple[str, ...]) -> str:
    """Return the model name in the request.

    Raises RequestError when it is missing, ApiError 404 when it is none of `models`.
    """
    name = text_field(fields, "model")
    if name is None:
        raise RequestError(f"'model' is required; this server has {models[0]!r}", "model")
    if name not in models:
        raise ApiError(404, f"the model {name[:200]!r} does not exist here; this server has {models[0]!r}", "model")
    return name


def fit_length(
    prompts: tuple[TokenPrompt, ...], params: SamplingParams, info: EngineInfo, length_field: str | None
) -> SamplingParams:
    """Set an open `max_tokens`, and raise RequestError for lengths that exceed the model's context or the KV pool.

    `length_field` None: the client set no output limit, so `max_tokens` becomes what the longest prompt leaves.
    """
    longest = max(prompt.tokens for prompt in prompts)
    bounds = [(info.max_model_len, "the model's context (max_model_len)"), (info.kv_tokens_total, "the KV pool")]
    for bound, what in bounds:
        # At least one output token must fit, hence >= and not >.
        if longest >= bound:
            raise RequestError(
                f"This model's maximum context length is {bound} tokens. However, you requested {longest + 1} tokens "
                f"({longest} in the prompt, and at least one must be left for output; {what} is the limit)",
                "prompt",
            )
        if length_field is not None and longest + params.max_tokens > bound:
            raise RequestError(
                f"This model's maximum context length is {bound} tokens. However, you requested "
                f"{longest + params.max_tokens} tokens ({longest} in the prompt, {params.max_tokens} in "
                f"{length_field}; {what} is the limit)",
                length_field,
            )
    left = min(bound for bound, _ in bounds) - longest
    if length_field is None:
        if params.min_tokens > left:
            raise RequestError(f"'min_tokens' ({params.min_tokens}) is above what is left ({left})", "min_tokens")
        return msgspec.structs.replace(params, max_tokens=left)
    return params


T = TypeVar("T")
Parse = Callable[[dict[str, Any], RequestContext, PromptReader], T]
"""Reads the fields of a body. A function of a module: large bodies are read in another process."""

INLINE_BYTES = 2 << 10
"""Bodies up to this size are parsed on the event loop: a thread would cost more than it saves. 2 KiB of text are some
0.5 ms of tokenisation."""

SMALL_BYTES = 64 << 10
"""Bodies above this size go to another process. Decoding one of this size holds the interpreter's lock for 10 ms at
most, whatever is in it."""

_SMALL_DOCUMENT = 16 << 10
"""Tokens of a prepared document up to which a thread tokenises it."""

_MOST_IDS = 8 << 20
"""Most token ids of one body: 32 MiB, which come back from the other process in one piece."""


@dataclass(slots=True)
class ReceivedBody:
    """One request's body."""

    received_s: float
    """When its last byte had arrived, `time.monotonic()` seconds."""
    size: int = 0
    data: bytearray | MemoryFile = None  # type: ignore[assignment]


class BodyReader:
    """Reader and parser of bodies. One per server; `close` ends its threads and processes."""

    def __init__(self, settings: ServerSettings, tokenizer: ModelTokenizer) -> None:
        self._settings = settings
        self._tokenizer = tokenizer
        # Bytes of all bodies being read or parsed; changed on the event loop only.
        self._held = 0
        self._threads = ThreadPoolExecutor(settings.worker_threads, thread_name_prefix="headway-parse")
        self.workers = BodyWorkers(tokenizer, settings.tokenizer_memory)

    @asynccontextmanager
    async def read(self, request: Request, most_bytes: int | None = None) -> AsyncIterator[ReceivedBody]:
        """Read a body, and hold its room among all bodies meanwhile.

        most_bytes: a smaller limit than the server's. Raises ApiError 413 above the size limit (without reading on),
        408 when the body does not arrive in time, 415 for compressed bodies, and OverloadedError when all bodies
        together are too large.
        """
        with self._reserve() as hold:
            yield await self._read(request, hold, most_bytes or self._settings.max_body_bytes)

    async def whole(self, request: Request, most_bytes: int) -> bytes:
        """Read a body of few bytes. Raises as `read` does."""
        async with self.read(request, most_bytes) as body:
            data = body.data
            return bytes(data) if isinstance(data, bytearray) else os.pread(data.descriptor, body.size, 0)

    async def parse(self, body: ReceivedBody, parse: Parse[T], context: RequestContext) -> T:
        """Return what `parse` makes of a body: on the event loop when it is short, else in a thread or a process.

        A short body that names a prepared document is tokenised with it.
        """
        document = 0 if context.prepared is None else context.prepared.tokens
        if isinstance(body.data, bytearray) and document <= _SMALL_DOCUMENT:
            if body.size <= INLINE_BYTES and not document:
                return parsed(self._tokenizer, body.data, parse, context)
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, parsed, self._tokenizer, body.data, parse, context)
        file = body.data if isinstance(body.data, MemoryFile) else _filed(body.data)
        return await self.workers.run(file, body.size, parsed, parse, context)

    def close(self) -> None:
        """End the threads and processes. Parses in threads finish; queued ones are cancelled."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.workers.close()

    @contextmanager
    def _reserve(self) -> Iterator[Callable[[int], None]]:
        """Yield a function that counts bytes of one body against the limit of all; release them at the end."""
        mine = 0

        def hold(size: int) -> None:
            nonlocal mine
            if self._held + size > self._settings.max_buffered_bytes:
                raise OverloadedError("too many large request bodies are being read at this time; try again")
            self._held += size
            mine += size

        try:
            yield hold
        finally:
            self._held -= mine

    async def _read(self, request: Request, hold: Callable[[int], None], limit: int) -> ReceivedBody:
        encoding = request.headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("", "identity"):
            raise ApiError(415, f"content-encoding {encoding[:40]!r} is not supported; send the JSON uncompressed")
        announced = request.headers.get("content-length", "")
        # Refuse by the announced length before reading; the header may lie, so the loop below counts as well.
        if announced.isdecimal() and int(announced[:20]) > limit:
            raise _too_large(limit)
        data: bytearray | MemoryFile = bytearray()
        size = 0
        try:
            async with asyncio.timeout(self._settings.body_timeout_s):
                async for chunk in request.stream():
                    size += len(chunk)
                    if size > limit:
                        raise _too_large(limit)
                    hold(len(chunk))
                    if isinstance(data, bytearray) and size > SMALL_BYTES:
                        data = _filed(data)
                    _append(data, chunk)
        except TimeoutError:
            waited = self._settings.body_timeout_s
            raise ApiError(408, f"the request body did not arrive within {waited:g} s", headers=_CLOSE) from None
        except ClientDisconnect:
            raise ApiError(499, "the client left before its request had arrived") from None
        # After the last byte: a client's slow upload is not part of its latency.
        return ReceivedBody(time.monotonic(), size, data)


def parsed(tokenizer: ModelTokenizer, body: bytes | bytearray, parse: Parse[T], context: RequestContext) -> T:
    """Decode a body and have it read. Raises RequestError and what `parse` raises."""
    reader = prompt_reader(tokenizer, context.info, context.settings)
    if len(body) > SMALL_BYTES:
        check_structure(bytes(body), min(reader.most_ids, _MOST_IDS))
    return parse(decode(body), context, reader)


def prompt_reader(tokenizer: ModelTokenizer, info: EngineInfo, settings: ServerSettings) -> PromptReader:
    """Make a reader of prompts that an engine can take."""
    return PromptReader(tokenizer, info.vocab_size, settings.max_prompts, min(info.max_model_len, info.kv_tokens_total))


def _filed(data: bytearray) -> MemoryFile:
    file = MemoryFile()
    _append(file, data)
    return file


def _append(data: bytearray | MemoryFile, chunk: bytes | bytearray) -> None:
    if isinstance(data, bytearray):
        data += chunk
        return
    left = memoryview(chunk)
    while left:
        left = left[os.write(data.descriptor, left) :]


# The rest of the body is not read, so that the connection cannot carry another request.
_CLOSE = {"Connection": "close"}


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the request body is larger than {limit} bytes", headers=_CLOSE)
