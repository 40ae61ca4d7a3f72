"""Reading request bodies, bounded in size, in time, and in total over all concurrent requests."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request

from headway.core.errors import OverloadedError
from headway.serving.errors import ApiError
from headway.serving.settings import ServerSettings

T = TypeVar("T")

INLINE_BYTES = 2 << 10
"""Bodies up to this size are parsed on the event loop: a thread would cost more than it saves. 2 KiB of text are some
0.5 ms of tokenisation."""

SHORT_BYTES = 256 << 10
"""Bodies above this size are parsed in a second pool: a chat does not queue behind a document's tokenisation."""

_DOCUMENT = re.compile(rb"context_id|\\u00[567]")
"""In a body that names a prepared document, which is then tokenised too; letters of the name may be escapes."""


class BodyReader:
    """Reader and parser of bodies, with the threads that parse and tokenise large ones. One per server."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        # Bytes of all bodies being read or parsed; changed on the event loop only.
        self._held = 0
        self._short = ThreadPoolExecutor(settings.worker_threads, thread_name_prefix="headway-parse-short")
        self._long = ThreadPoolExecutor(settings.worker_threads, thread_name_prefix="headway-parse-long")

    async def parse(
        self, request: Request, parse: Callable[[bytearray, float], T], *, most_bytes: int | None = None
    ) -> T:
        """Read the body and return `parse(body, received_s)`: on the event loop when short, else in a worker thread.

        most_bytes: a smaller limit than the server's. Raises ApiError 413 above the size limit (without reading on),
        408 when the body does not arrive in time, 415 for compressed bodies, and OverloadedError when all bodies
        together are too large.
        """
        with self._reserve() as hold:
            body = await self._read(request, hold, most_bytes or self._settings.max_body_bytes)
            # After the last byte: a client's slow upload is not part of its latency.
            received_s = time.monotonic()
            long = len(body) > SHORT_BYTES or _DOCUMENT.search(body) is not None
            if len(body) <= INLINE_BYTES and not long:
                return parse(body, received_s)
            threads = self._long if long else self._short
            return await asyncio.get_running_loop().run_in_executor(threads, parse, body, received_s)

    def close(self) -> None:
        """Shut down the threads. Parses in progress finish; queued ones are cancelled."""
        for threads in (self._short, self._long):
            threads.shutdown(wait=False, cancel_futures=True)

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

    async def _read(self, request: Request, hold: Callable[[int], None], limit: int) -> bytearray:
        encoding = request.headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("", "identity"):
            raise ApiError(415, f"content-encoding {encoding[:40]!r} is not supported; send the JSON uncompressed")
        announced = request.headers.get("content-length", "")
        # Refuse by the announced length before reading; the header may lie, so the loop below counts as well.
        if announced.isdecimal() and int(announced[:20]) > limit:
            raise _too_large(limit)
        body = bytearray()
        try:
            async with asyncio.timeout(self._settings.body_timeout_s):
                async for chunk in request.stream():
                    if len(body) + len(chunk) > limit:
                        raise _too_large(limit)
                    hold(len(chunk))
                    body += chunk
        except TimeoutError:
            waited = self._settings.body_timeout_s
            raise ApiError(408, f"the request body did not arrive within {waited:g} s", headers=_CLOSE) from None
        except ClientDisconnect:
            raise ApiError(499, "the client left before its request had arrived") from None
        return body


# The rest of the body is not read, so that the connection cannot carry another request.
_CLOSE = {"Connection": "close"}


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the request body is larger than {limit} bytes", headers=_CLOSE)
