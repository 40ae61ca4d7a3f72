"""Connections of clients: the tasks that compute answers, server-sent events to slow or disconnected readers, and
bounds on the number and idle time of connections.

Three tasks per stream: the *pump* moves events from the source into a small buffer, the *writer* sends the buffer, the
*watcher* waits for the client to disconnect. In every case the source is closed before the response ends.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
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


# Client connections, bounded in number and in how long they may wait without a request: uvicorn's HTTP/1.1 protocol
# with what it has no options for.
#
# uvicorn bounds the time between requests of a connection, but not that of a first or a half-sent one, and at its limit
# of connections it refuses health checks as well. Here: a header time-out; a limit at which the connection that has
# waited longest without a request makes place for a new one; a reserve, where all are busy, for health checks; and an
# answer for clients that have closed their sending side only.

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
_PEER_CHECK_S = 0.25
"""Time between two looks at whether a client that closed its sending side is there at all."""
_TCP_CLOSE = 7
"""State of a connection in `TCP_INFO` once the other end has reset it."""


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
        self._half_closed = False

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

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection open where the client has sent a whole request and only closed its sending side.

        A client that has left altogether looks the same until it is sent something: its system then answers with a
        reset. So something is sent at once that clients ignore: an interim response, or a comment in a stream.
        """
        if self._half_closed:
            return True
        if not self._busy or self.cycle.more_body:
            return False
        self._half_closed = True
        self.cycle.keep_alive = False
        if not self.cycle.response_started and self.conn.our_state is h11.SEND_RESPONSE:
            self.transport.write(self.conn.send(h11.InformationalResponse(status_code=100, headers=[])) or b"")
        else:
            scope: dict[str, Any] = dict(self.scope)
            scope.get("headway.half_closed", _nothing)()
        self.loop.call_later(_PEER_CHECK_S, self._check_peer)
        return True

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

    def _check_peer(self) -> None:
        """End the connection when the other end has reset it; look again later otherwise."""
        if self.transport.is_closing():
            return
        connection: socket.socket = self.transport.get_extra_info("socket")
        if connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSE:
            self.transport.abort()
        else:
            self.loop.call_later(_PEER_CHECK_S, self._check_peer)


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


def _nothing() -> None:
    """Stand for a callback that no stream has set."""
