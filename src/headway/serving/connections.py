"""Client connections, bounded in number and in how long they may wait without a request: uvicorn's HTTP/1.1 protocol
with what it has no options for.

uvicorn bounds the time between requests of a connection, but not that of a first or a half-sent one, and at its limit
of connections it refuses health checks as well. Here: a header time-out; a limit at which the connection that has
waited longest without a request makes place for a new one; a reserve, where all are busy, for health checks; and an
answer for clients that have closed their sending side only.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import time
from typing import Any

import h11
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from headway.serving.errors import ApiError, error_response
from headway.serving.settings import ServerSettings

log = logging.getLogger("headway.server")

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
