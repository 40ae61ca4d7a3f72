"""Connections of clients: the tasks that compute answers, server-sent events to slow or disconnected readers, and
bounds on the number and idle time of connections.

Two tasks per stream: the *writer* takes events from the source and sends them, the *watcher* waits for the client to
disconnect. In every case the source is closed before the response ends.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

import h11
import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from headway.serving.errors import ApiError, as_api_error, error_object, error_response, server_ending_error
from headway.serving.settings import ServerSettings

T = TypeVar("T")


class ActiveTasks:
    """A set of running tasks, which `cancel` ends, tasks begun later included.

    The awaiter of a cancelled task answers with `server_ending_error`. Used on the event loop only.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._cancelled = False

    def begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run `work` as a task; `cancel` cancels it, but not before its first step."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # call_soon runs after the task's first step: a coroutine cancelled before it would skip its own cleanup.
        if self._cancelled:
            asyncio.get_running_loop().call_soon(task.cancel)
        return task

    def cancel(self) -> None:
        """Cancel all tasks, and every task begun from now on. Idempotent."""
        self._cancelled = True
        for task in self._tasks:
            asyncio.get_running_loop().call_soon(task.cancel)


_BACKLOG = 64


async def merged(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Yield (index of the source, item) until all sources have ended; the first error or closing ends all of them.

    All sources are started at once. At most `_BACKLOG` items are queued: a slow reader slows the sources.
    """
    # The common case needs no task and no queue.
    if len(sources) == 1:
        async with aclosing(sources[0]) as only:
            async for item in only:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, T] | BaseException | None] = asyncio.Queue(_BACKLOG)

    # Puts the source's items, then None at its end or the exception that ended it.
    async def forward(index: int, source: AsyncGenerator[T, None]) -> None:
        end: BaseException | None = None
        try:
            async with aclosing(source):
                async for item in source:
                    await queue.put((index, item))
        except Exception as error:  # raised again by the reader
            end = error
        # Not reached on cancellation: then nothing reads the queue any more.
        await queue.put(end)

    tasks = [asyncio.create_task(forward(index, source)) for index, source in enumerate(sources)]
    try:
        running = len(tasks)
        while running:
            got = await queue.get()
            if got is None:
                running -= 1
            elif isinstance(got, BaseException):
                raise got
            else:
                yield got
    finally:
        await cancel_all(tasks)


async def cancel_all(tasks: Sequence[asyncio.Task[object]] | Sequence[asyncio.Task[None]]) -> None:
    """Cancel all tasks and wait until each has finished its cleanup. Their exceptions are ignored."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


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
    client that takes nothing for `slow_client_timeout_s` seconds is disconnected; meanwhile `source` waits.
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
        self._active = active
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response; called by the framework."""
        writer = asyncio.create_task(self._write(scope, receive, send))
        watcher = asyncio.create_task(client_gone(receive))
        try:
            await asyncio.wait({writer, watcher}, return_when=asyncio.FIRST_COMPLETED)
            if not writer.done():
                scope.setdefault("headway.log", {})["client"] = "gone"
            elif writer.exception() is not None:
                scope.setdefault("headway.log", {})["client"] = "too slow or gone"
        finally:
            # Waits for the writer to close the source, which aborts the request in the engine.
            await cancel_all([writer, watcher])
            self._on_end()

    async def _write(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the status line, then each event as it comes, and keep-alive comments in between."""
        begun, last = False, False
        patience_s = min(_FIRST_WAIT_S, self._settings.keep_alive_s)
        async with aclosing(self._source) as source:
            while not last:
                # Registered as active: a shutdown cancels it, and the client is sent that error.
                coming = self._active.begin(_next(source))
                try:
                    while not coming.done():
                        await asyncio.wait({coming}, timeout=patience_s)
                        patience_s = self._settings.keep_alive_s
                        data, error = (KEEP_ALIVE if begun else b"", None) if not coming.done() else _outcome(coming)
                        if error is not None and not begun:
                            await error_response(error)(scope, receive, send)
                            return
                        last = error is not None or data is None
                        if not begun:
                            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
                            begun = True
                        body = event(error_object(error)) if error is not None else data or b""
                        async with asyncio.timeout(self._settings.slow_client_timeout_s):
                            await send({"type": "http.response.body", "body": body, "more_body": not last})
                finally:
                    if not coming.done():
                        await cancel_all([coming])


async def _next(source: AsyncGenerator[bytes, None]) -> bytes | None:
    """Return the next item; None at the end."""
    return await anext(source, None)


def _outcome(coming: asyncio.Task[bytes | None]) -> tuple[bytes | None, ApiError | None]:
    """Return a finished task's item, or the error to show for what it raised."""
    if coming.cancelled():
        return None, as_api_error(server_ending_error())
    error = coming.exception()
    if error is None:
        return coming.result(), None
    shown = as_api_error(error)
    if shown.status == 500 and not isinstance(error, ApiError):
        log.error("a stream failed", exc_info=error)
    return None, shown


async def client_gone(receive: Receive) -> None:
    """Return when the client has closed its connection. The request's body must have been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


# Client connections, bounded in number and in how long they may wait without a request: uvicorn's HTTP/1.1 protocol
# with what it has no options for.
#
# uvicorn bounds the time between requests of a connection, but not that of a first or a half-sent one, and at its limit
# of connections it refuses health checks as well. Here: a header time-out; a limit at which the connection that has
# waited longest without a request makes place for a new one; and a reserve, where all are busy, for health checks.

PROBES = ("/health", "/ready", "/metrics")
"""Paths that connections of the reserve may ask for."""
RESERVE = 16
"""Connections above the limit, for `PROBES` only."""
_BACKLOG = 128
"""Most connections that are accepted in one step of the event loop. Each takes a file before it can be refused."""
_OWN_FILES = 64
"""Files that the server itself needs, for the engine, the journal and logs."""
_WANTED_FILES = 65_536
_REPORT_S = 60.0
"""Shortest time between two log lines about refused connections."""


def raise_file_limit() -> None:
    """Let this process open as many files as the system allows it, up to what connections can need."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED_FILES if hard == resource.RLIM_INFINITY else min(hard, _WANTED_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class ConnectionTable:
    """All client connections of one server. Used on the event loop only."""

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        allowed, backlog = settings.max_connections, _BACKLOG
        # An accept that fails for want of files would be tried and logged again and again.
        if files != resource.RLIM_INFINITY and files - RESERVE - _BACKLOG - _OWN_FILES < allowed:
            left = max(RESERVE, files - RESERVE - _OWN_FILES)
            # A fifth: a new connection has some steps to send its request before others take its place.
            backlog = min(_BACKLOG, max(1, left // 5))
            allowed = min(allowed, left - backlog)
            log.info("at most %d connections at one time: %d files may be open (ulimit -n)", allowed, files)
        self.limit, self.backlog = allowed, backlog
        self.open = 0
        # Connections without a request in progress, from the one that has waited longest.
        self.waiting: dict[HttpConnection, None] = {}
        self._refused = 0
        self._reported_s = float("-inf")

    def refused(self, count: int = 1) -> None:
        """Count refused connections; log them at most once a minute."""
        self._refused += count
        now = time.monotonic()
        if now - self._reported_s >= _REPORT_S:
            fields = {"refused": self._refused, "open": self.open, "limit": self.limit}
            log.warning("too many connections", extra={"fields": fields})
            self._refused, self._reported_s = 0, now

    def on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handle an error outside of any task: failed accepts are counted like refused connections."""
        error = context.get("exception")
        if isinstance(error, OSError) and "socket.accept()" in str(context.get("message")):
            self.refused()
        else:
            loop.default_exception_handler(context)


class HttpConnection(H11Protocol):
    """One client's connection."""

    def __init__(self, *args: Any, table: ConnectionTable, **named: Any) -> None:
        super().__init__(*args, **named)
        self._table = table
        self._settings = table.settings
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Admit the connection, in place of the one that has waited longest where there are too many."""
        super().connection_made(transport)
        table = self._table
        table.open += 1
        if table.open > table.limit and table.waiting:
            table.refused()
            next(iter(table.waiting)).end()
        elif table.open > table.limit + RESERVE:
            table.refused()
            transport.abort()
            return
        elif table.open > table.limit:
            self.app = _ProbesOnly(self.app)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._table.open -= 1
        self._no_longer_wait()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Handle what the client sent."""
        super().data_received(data)
        # Bytes of a header, or of a body that no one reads, do not extend the time.
        if self._busy:
            self._no_longer_wait()
        else:
            self._wait()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP, and close. A request whose body was broken off so gets no other answer."""
        if self._busy:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in {h11.IDLE, h11.SEND_RESPONSE}:
            super().send_400_response(msg)
        else:
            self.transport.close()

    def on_response_complete(self) -> None:
        """Wait for the next request, or close."""
        super().on_response_complete()
        if self.transport.is_closing():
            # A client that reads nothing would keep the connection until it has taken the rest.
            self.loop.call_later(self._settings.slow_client_timeout_s, self.transport.abort)
        elif not self._busy:
            # Bounded by uvicorn's own time-out between requests; may be closed to make place.
            self._table.waiting[self] = None

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection that has been idle between requests; called by uvicorn."""
        self.end()

    def end(self) -> None:
        """Close a connection that waits for a request."""
        self._no_longer_wait()
        if not self.transport.is_closing():
            self.transport.close()
            self.loop.call_later(self._settings.slow_client_timeout_s, self.transport.abort)

    @property
    def _busy(self) -> bool:
        """Whether a request is being answered."""
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and not cycle.response_complete

    def _wait(self) -> None:
        """Start the header time-out, unless it runs."""
        self._table.waiting.setdefault(self, None)
        if self._timer is None and not self.transport.is_closing():
            self._timer = self.loop.call_later(self._settings.header_timeout_s, self.end)

    def _no_longer_wait(self) -> None:
        self._table.waiting.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _ProbesOnly:
    """ASGI application of a connection above the limit: health checks pass, all else gets 503."""

    def __init__(self, app: Any) -> None:
        self._app: ASGIApp = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in PROBES:
            await self._app(scope, receive, send)
            return
        headers = {"Connection": "close", "Retry-After": "1"}
        message = "too many connections are open at this time; try again"
        await error_response(ApiError(503, message, headers=headers))(scope, receive, send)
