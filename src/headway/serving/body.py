"""Reading and parsing request bodies, bounded in size, in time, and in total over all concurrent requests."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from headway.core.errors import OverloadedError
from headway.runtime.engine.protocol import EngineInfo
from headway.serving.body_worker import BodyWorkers, MemoryFile
from headway.serving.errors import ApiError
from headway.serving.generation_job import RequestContext
from headway.serving.json_object import check_structure, decode
from headway.serving.prompts import PromptReader
from headway.serving.settings import ServerSettings
from headway.serving.tokenizer import ModelTokenizer

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
