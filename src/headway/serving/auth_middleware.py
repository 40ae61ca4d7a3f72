"""Outermost ASGI layer: request id, authorisation, log line, uncaught errors.

A plain ASGI wrapper instead of framework middleware, so that streams pass through unbuffered.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headway.serving.active_tasks import server_ending_error
from headway.serving.errors import ApiError, as_api_error, error_response
from headway.serving.identity import request_id
from headway.serving.logging import log_request

log = logging.getLogger("headway.server")

PROTECTED = ("/v1/", "/tokenize", "/detokenize")


class AuthMiddleware:
    """ASGI middleware. Without `api_key` all requests pass; paths outside `PROTECTED` are always open."""

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        self._app = app
        self._expected = f"Bearer {api_key}".encode() if api_key is not None else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request: authorise, forward, log."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(reversed(scope["headers"]))  # of repeated headers the first wins: dict() keeps the last
        ident = request_id(headers.get(b"x-request-id", b"").decode("latin-1"))
        # Filled by the endpoint (`records`, `client`), read below for the log line.
        notes: dict[str, Any] = {}
        scope["headway.id"], scope["headway.log"] = ident, notes
        began, status = time.monotonic(), 0

        # Adds the request id to the response's headers, and notes the status for the log line.
        async def stamped(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message["headers"], (b"x-request-id", ident.encode())]}
            await send(message)

        try:
            if self._may_pass(scope["path"], headers.get(b"authorization", b"")):
                await self._app(scope, receive, stamped)
            else:
                refusal = ApiError(401, "missing or wrong API key", headers={"WWW-Authenticate": "Bearer"})
                notes["refused"] = str(refusal)
                await error_response(refusal)(scope, receive, stamped)
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

    def _may_pass(self, path: str, given: bytes) -> bool:
        if self._expected is None or not path.startswith(PROTECTED):
            return True
        # Constant time, so that the key cannot be guessed byte by byte.
        return hmac.compare_digest(given, self._expected)
