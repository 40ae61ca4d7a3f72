"""Server-sent events over one connection: keep-alive comments, slow readers, disconnected clients.

Three tasks per stream: the *pump* moves events from the source into a small buffer, the *writer* sends the buffer, the
*watcher* waits for the client to disconnect. In every case the source is closed before the response ends.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headway.serving.active_tasks import ActiveTasks, server_ending_error
from headway.serving.errors import ApiError, as_api_error, error_object, error_response
from headway.serving.merge import cancel_all
from headway.serving.settings import ServerSettings

log = logging.getLogger("headway.server")

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_FIRST_WAIT_S = 1.0
"""Seconds that the status line waits for a first event, so that an early refusal still sets the status code."""


def event(content: object) -> bytes:
    """Encode one `data:` event as JSON; an object of the Responses API has its type as the event's name too."""
    kind = content.get("type") if isinstance(content, dict) else None
    name = b"event: %b\n" % kind.encode() if isinstance(kind, str) else b""
    return name + b"data: " + msgspec.json.encode(content) + b"\n\n"


class SseResponse(Response):
    """Response that streams `source`, whose items are whole events. `on_end` is called once, after it is closed.

    An error before the first byte becomes an ordinary error response; a later one becomes a last event of the stream. A
    client that leaves the stream unread for `slow_client_timeout_s` seconds is disconnected.
    """

    def __init__(
        self,
        source: AsyncGenerator[bytes, None],
        settings: ServerSettings,
        active: ActiveTasks,
        on_end: Callable[[], None],
    ) -> None:
        super().__init__(status_code=200, media_type="text/event-stream")
        self._source = source
        self._settings = settings
        self._ongoing = active
        self._on_end = on_end
        # Events not yet sent, and their size in bytes.
        self._buffer: list[bytes] = []
        self._buffered = 0
        self._error: ApiError | None = None
        self._ended = False
        # Wakes the writer: something to send, or the end. `_emptied` wakes the pump: the buffer was sent.
        self._filled = asyncio.Event()
        self._emptied = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response; called by the framework."""
        scope["headway.half_closed"] = self._probe
        # The pump is registered as active: at shutdown it is cancelled, and the writer sends its error.
        tasks = [self._ongoing.begin(self._pump())]
        try:
            writer = asyncio.create_task(self._write(scope, receive, send))
            watcher = asyncio.create_task(client_gone(receive))
            tasks += [writer, watcher]
            await asyncio.wait({writer, watcher}, return_when=asyncio.FIRST_COMPLETED)
            if not writer.done():
                scope.setdefault("headway.log", {})["client"] = "gone"
            elif writer.exception() is not None:
                scope.setdefault("headway.log", {})["client"] = "too slow or gone"
        finally:
            # Waits for the pump to close the source, which aborts the request in the engine.
            await cancel_all(tasks)
            self._on_end()

    async def _pump(self) -> None:
        """Move events from the source to the buffer; wait while the client is too far behind."""
        # Seconds waited since the buffer was last empty: one budget for all waits of a client that never catches up.
        blocked_s = 0.0
        try:
            async with aclosing(self._source) as source:
                async for item in source:
                    self._buffer.append(item)
                    self._buffered += len(item)
                    self._filled.set()
                    # Let the writer run, so that a fast client counts as having caught up.
                    await asyncio.sleep(0)
                    if self._buffered > self._settings.slow_client_buffer_bytes:
                        blocked_s += await self._room(self._settings.slow_client_timeout_s - blocked_s)
                    elif not self._buffer:
                        blocked_s = 0.0
        except asyncio.CancelledError:
            self._error = as_api_error(server_ending_error())  # sent by the writer, if the client is still connected
            raise
        except Exception as error:
            self._error = as_api_error(error)
            if self._error.status == 500 and not isinstance(error, ApiError):
                log.exception("a stream failed")
        finally:
            self._ended = True
            self._filled.set()

    async def _room(self, patience_s: float) -> float:
        """Wait until the writer has taken the buffer; return the seconds waited.

        Raises ApiError 408 after `patience_s` seconds.
        """
        began = time.monotonic()
        self._emptied.clear()
        try:
            async with asyncio.timeout(patience_s):
                await self._emptied.wait()
        except TimeoutError:
            raise ApiError(408, "the stream was not read fast enough") from None
        return time.monotonic() - began

    async def _write(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the status line, then the buffer whenever it is filled, and keep-alive comments in between."""
        await self._wait(min(_FIRST_WAIT_S, self._settings.keep_alive_s))
        if self._error is not None and not self._buffer:
            await error_response(self._error)(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        while True:
            # `_ended` is read before the buffer is taken: no event can be added after it.
            last = self._ended
            data = self._take()
            if not data and not last:
                silent = not await self._wait(self._settings.keep_alive_s)
                data, last = (KEEP_ALIVE, False) if silent else (self._take(), self._ended)
            if last and self._error is not None:
                data += event(error_object(self._error))
            async with asyncio.timeout(self._settings.slow_client_timeout_s):
                await send({"type": "http.response.body", "body": data, "more_body": not last})
            if last:
                return

    def _probe(self) -> None:
        """Send a comment now: a client that has left altogether is noticed by it."""
        if not self._ended:
            self._buffer.append(KEEP_ALIVE)
            self._filled.set()

    async def _wait(self, seconds: float) -> bool:
        """Wait for something to send or the end of the source; return False after `seconds` without either."""
        if self._buffer or self._ended:
            return True
        self._filled.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._filled.wait()
        except TimeoutError:
            return False
        return True

    def _take(self) -> bytes:
        """Empty the buffer, wake the pump, and return the bytes."""
        data = b"".join(self._buffer)
        self._buffer.clear()
        self._buffered = 0
        self._emptied.set()
        return data


async def client_gone(receive: Receive) -> None:
    """Return when the client has closed its connection. The request's body must have been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass
