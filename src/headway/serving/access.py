"""Access control: keys of clients and operators, checks of a browser's origin, and the outermost ASGI layer, which
checks and logs each request.

Without a key the server is for programs on its own machine. A web page in a browser there can send requests to loopback
too, so the headers Origin and Host are checked. A foreign name that resolves to 127.0.0.1 ("DNS rebinding") is refused.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headway.serving.errors import ApiError, as_api_error, error_response, own_id, request_id, server_ending_error
from headway.serving.metrics import log_request
from headway.serving.settings import ServerSettings, is_loopback

PROTECTED = ("/v1/", "/tokenize", "/detokenize")
_ADMINISTRATION = "/v1/cluster"


@dataclass(frozen=True, slots=True)
class RequestOwner:
    """The client that sent a request, identified by its key."""

    id: str = ""
    """A hash of the key; empty without one. Its journaled requests and prepared documents carry it."""
    admin: bool = False
    """Whether the key is `--admin-key`, which may read and delete the requests of all owners."""

    def may_use(self, owner: str) -> bool:
        """Whether a request of that owner may be read and deleted."""
        return self.admin or self.id == owner


class AccessControl:
    """The rules of one server. Paths outside `PROTECTED` are open."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._keys = settings.api_keys
        self._admin_key = settings.admin_key

    def check(self, scope: Scope, headers: Mapping[bytes, bytes]) -> RequestOwner:
        """Return the request's owner. Raises ApiError 401 or 403 for what it may not do."""
        if not scope["path"].startswith(PROTECTED):
            return RequestOwner()
        owner = self._owner(headers.get(b"authorization", b""))
        if scope["path"].startswith(_ADMINISTRATION):
            self._check_administration(scope, owner)
        elif self._keys and owner is None:
            raise _refusal("missing or wrong API key")
        if not self._keys and owner is None:
            self._check_page(headers)
        return owner or RequestOwner()

    def _owner(self, given: bytes) -> RequestOwner | None:
        """Return the owner whose key was sent; None for no key or an unknown one."""
        found: RequestOwner | None = None
        for key in (*self._keys, *([self._admin_key] if self._admin_key else [])):
            # Constant time, and all keys are compared, so that none can be guessed byte by byte.
            if hmac.compare_digest(given, f"Bearer {key}".encode()):
                found = RequestOwner(hashlib.sha256(key.encode()).hexdigest()[:16], key == self._admin_key)
        return found

    def _check_administration(self, scope: Scope, owner: RequestOwner | None) -> None:
        if self._admin_key is not None:
            if owner is None or not owner.admin:
                raise _refusal("missing or wrong administration key (--admin-key)")
        elif self._keys:
            if owner is None:
                raise _refusal("missing or wrong API key")
            raise ApiError(403, "clients' keys do not administer the cluster: the server needs --admin-key for that")
        elif not is_loopback((scope.get("client") or ("",))[0]):
            raise ApiError(403, "without --admin-key a cluster is administered from its own machine only")

    def _check_page(self, headers: Mapping[bytes, bytes]) -> None:
        """Refuse web pages of other sites, and foreign host names on loopback. Raises ApiError 403."""
        host = headers.get(b"host", b"").decode("latin-1")
        name = urlsplit(f"//{host}").hostname or ""
        known = is_loopback(name) or name.endswith(".localhost") or name in self._settings.allowed_hosts
        # On other addresses the operator has said that a gateway in front decides (--allow-public).
        if host and not known and is_loopback(self._settings.host):
            raise ApiError(403, f"the host {name[:100]!r} is not this machine: use localhost, or --allowed-hosts")
        origin = headers.get(b"origin", b"").decode("latin-1")
        allowed = self._settings.allowed_origins
        if origin and urlsplit(origin).netloc != host and "*" not in allowed and origin not in allowed:
            raise ApiError(403, f"pages of {origin[:100]!r} may not call this server (--allowed-origins)")


def _refusal(why: str) -> ApiError:
    return ApiError(401, why, headers={"WWW-Authenticate": "Bearer"})


log = logging.getLogger("headway.server")

_HEADS = ("/", "/health", "/ready", "/version", "/metrics", "/v1/models")
"""Paths that probes ask for by HEAD."""


class AuthMiddleware:
    """Outermost ASGI layer: request ids, HEAD of `_HEADS`, authorisation, errors as responses, and the log line.

    A plain ASGI wrapper, not the framework's middleware, so that streams pass unbuffered."""

    def __init__(self, app: ASGIApp, access: AccessControl) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request. An exception is raised on only if the response has begun."""
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
