"""Outermost ASGI layer: request id, authorisation, log line, uncaught errors.

A plain ASGI wrapper instead of framework middleware, so that streams pass through unbuffered.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headway.serving.access_control import AccessControl
from headway.serving.active_tasks import server_ending_error
from headway.serving.errors import ApiError, as_api_error, error_response
from headway.serving.identity import own_id, request_id
from headway.serving.logging import log_request

log = logging.getLogger("headway.server")

_HEADS = ("/", "/health", "/ready", "/version", "/metrics", "/v1/models")
"""Paths that probes ask for by HEAD."""


class AuthMiddleware:
    """ASGI middleware. access: which requests pass."""

    def __init__(self, app: ASGIApp, access: AccessControl) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request: authorise, forward, log."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = _origin_form(scope)
        if scope["method"] == "HEAD" and scope["path"] in _HEADS:
            scope, send = {**scope, "method": "GET"}, _without_body(send)
        headers = dict(reversed(scope["headers"]))  # of repeated headers the first wins: dict() keeps the last
        ident = request_id(headers.get(b"x-request-id", b"").decode("latin-1"))
        # Filled by the endpoint (`records`, `client`), read below for the log line.
        notes: dict[str, Any] = {}
        key = own_id()
        scope["headway.id"], scope["headway.key"], scope["headway.log"] = ident, key, notes
        began, status = time.monotonic(), 0

        # Adds the label and the key to the response's headers, and notes the status for the log line.
        async def stamped(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                ids = ((b"x-request-id", ident.encode()), (b"x-headway-id", key.encode()))
                message = {**message, "headers": [*message["headers"], *ids]}
            await send(message)

        try:
            try:
                _check_framing(headers)
                scope["headway.owner"] = self._access.check(scope, headers)
            except ApiError as refusal:
                notes["refused"] = str(refusal)
                await error_response(refusal)(scope, receive, stamped)
            else:
                await self._app(scope, receive, stamped)
        except asyncio.CancelledError:  # the server's shutdown cancelled the request
            # A response that has begun cannot be replaced by an error.
            if status:
                raise
            await error_response(as_api_error(server_ending_error()))(scope, receive, stamped)
        except Exception as error:
            log.exception("request failed", extra={"fields": {"request_id": ident, "path": scope["path"]}})
            if status:
                raise
            await error_response(as_api_error(error))(scope, receive, stamped)
        finally:
            took = time.monotonic() - began
            log_request(
                ident, scope["method"], scope["path"], status, took, notes.get("records", ()), notes.get("client"),
                notes.get("refused"),
            )  # fmt: skip


def _origin_form(scope: Scope) -> Scope:
    """Return the scope of a request whose target names the host as well (RFC 9112 §3.2.2): that host is the one."""
    if not scope["path"].lower().startswith(("http://", "https://")):
        return scope
    authority, _, path = scope["path"].partition("://")[2].partition("/")
    raw = scope.get("raw_path", b"").partition(b"://")[2].partition(b"/")[2]
    headers = [(name, value) for name, value in scope["headers"] if name != b"host"]
    headers.append((b"host", authority.encode("latin-1", "replace")))
    return {**scope, "path": f"/{path}", "raw_path": b"/" + raw, "headers": headers}


def _check_framing(headers: dict[bytes, bytes]) -> None:
    """Refuse a body of two lengths (RFC 9112 §6.1): a proxy in front may have read the other one. Raises ApiError."""
    if b"content-length" in headers and b"transfer-encoding" in headers:
        raise ApiError(
            400, "send either Content-Length or Transfer-Encoding, not both", headers={"Connection": "close"}
        )


def _without_body(send: Send) -> Send:
    async def head(message: Message) -> None:
        await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

    return head
