"""One server: probes, metrics and streamed completions over HTTP."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from headway.core.errors import HeadwayError, RequestError
from headway.core.sse import SseParser
from headway.runtime.http_cluster.server_metrics import ServerLoad, parse_load

if TYPE_CHECKING:
    import aiohttp

PROBE_S = 0.9
"""Seconds that a server has to answer a probe."""
_PAGE_S = 5.0
"""Seconds that a page of metrics or models may take."""
_CONNECT_S = 5.0
_LONGEST_RETRY_S = 30.0


class ServerGoneError(HeadwayError):
    """The connection was refused or broke off, or the server reported a failure of its own."""


class ServerBusyError(HeadwayError):
    """The server takes nothing now (429 or 503)."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ServedModel(msgspec.Struct, frozen=True):
    """The first model of `/v1/models`."""

    id: str
    max_model_len: int | None = None


class StreamedTokens(msgspec.Struct, frozen=True):
    """One event of an answer. An event without tokens and `finish` says that the server has accepted the request."""

    tokens: tuple[int, ...] = ()
    finish: str | None = None
    """The server's `finish_reason`."""


def open_session() -> aiohttp.ClientSession:
    """Return a session for the clients of any number of servers, each request on a connection of its own.

    A server closes a connection that was idle for some seconds (vLLM: five). A completion that is sent on it at that
    moment fails as if the server were gone, and aiohttp repeats nothing but reads. Needs a running event loop.
    """
    import aiohttp

    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True))


class HttpServer:
    """Client of one server. `url`: without a path; `session`: of `open_session`. Raises nothing but what the methods
    name."""

    def __init__(self, url: str, session: aiohttp.ClientSession, api_key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._session = session
        self._alive_at = "/ready"
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}

    async def healthy(self) -> bool:
        """Return whether the server serves. False where it does not answer within `PROBE_S`."""
        # `headway serve` is alive before its engine is ready; vLLM has no /ready and answers /health when it is.
        try:
            status = (await self._fetch(self._alive_at, PROBE_S))[0]
            if status == 404 and self._alive_at == "/ready":
                self._alive_at = "/health"
                status = (await self._fetch(self._alive_at, PROBE_S))[0]
        except ServerGoneError:
            return False
        return status == 200

    async def model(self) -> ServedModel:
        """Return what is served. Raises ServerGoneError."""
        try:
            page = msgspec.json.decode(await self._get("/v1/models"))
            first = page["data"][0]
            return ServedModel(str(first["id"]), first.get("max_model_len"))
        except (msgspec.DecodeError, KeyError, IndexError, TypeError) as error:
            raise ServerGoneError(f"{self.url}/v1/models is not an OpenAI server's ({error!r})") from None

    async def load(self) -> ServerLoad:
        """Return the load from `/metrics`. Raises ServerGoneError."""
        return parse_load((await self._get("/metrics")).decode("utf-8", "replace"))

    async def complete(self, body: dict[str, Any], headers: dict[str, str]) -> AsyncIterator[StreamedTokens]:
        """Stream an answer up to its finish reason. Closing the iterator closes the connection, which ends the request.

        Raises RequestError, ServerBusyError or ServerGoneError."""
        async with self._completion(body, headers) as response:
            yield StreamedTokens()
            parser = SseParser()
            async for chunk in response.content.iter_any():
                for event in parser.feed(chunk):
                    piece = _piece(event.name, event.data)
                    if piece is not None:
                        yield piece
                        if piece.finish is not None:
                            return
        raise ServerGoneError(f"{self.url}: the answer broke off")

    async def prefill(self, body: dict[str, Any], headers: dict[str, str]) -> dict[str, Any]:
        """Compute a prompt and keep its KV; return the `kv_transfer_params` with which another server reads it.

        Cancelling closes the connection, which ends the request. Raises RequestError, ServerBusyError or
        ServerGoneError."""
        async with self._completion(body, headers) as response:
            page = await response.read()
        try:
            parameters = msgspec.json.decode(page).get("kv_transfer_params")
        except (msgspec.DecodeError, AttributeError):
            parameters = None
        if not isinstance(parameters, dict):
            raise ServerGoneError(f"{self.url} gives no `kv_transfer_params`: start it with vLLM's NixlConnector")
        return parameters

    @asynccontextmanager
    async def _completion(self, body: dict[str, Any], headers: dict[str, str]) -> AsyncIterator[aiohttp.ClientResponse]:
        """Ask for a completion. Raises RequestError, ServerBusyError or ServerGoneError, also while it is read."""
        import aiohttp

        try:
            async with self._session.post(
                f"{self.url}/v1/completions",
                data=msgspec.json.encode(body),
                headers={"Content-Type": "application/json", **headers},
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
            ) as response:
                if response.status != 200:
                    raise _refusal(response.status, await response.read(), response.headers.get("Retry-After"))
                yield response
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ServerGoneError(f"{self.url}: {str(error) or type(error).__name__}") from error

    async def _get(self, path: str) -> bytes:
        status, page = await self._fetch(path, _PAGE_S)
        if status != 200:
            raise ServerGoneError(f"{self.url}{path} answers {status}")
        return page

    async def _fetch(self, path: str, patience_s: float) -> tuple[int, bytes]:
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=patience_s)
        try:
            async with self._session.get(self.url + path, headers=self._headers, timeout=timeout) as response:
                return response.status, await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ServerGoneError(f"{self.url}: {str(error) or type(error).__name__}") from error


def _refusal(status: int, page: bytes, retry_after: str | None) -> HeadwayError:
    """Return the error of an answer that is not 200."""
    message, param = _message(page)
    if status in (429, 503):
        return ServerBusyError(message, _seconds(retry_after))
    if 400 <= status < 500 and status not in (401, 403, 404):
        return RequestError(message, param)
    # 401 and 404 are no fault of the client's: this instance is not the one that the file promises.
    return ServerGoneError(f"the instance answers {status}: {message}")


def _message(page: bytes) -> tuple[str, str | None]:
    """Return the message of an error object in OpenAI's form, and the field that it names."""
    try:
        data = msgspec.json.decode(page)
        error = data.get("error", data)
        return str(error["message"])[:2000], error.get("param")
    except (msgspec.DecodeError, AttributeError, KeyError, TypeError):
        return page[:200].decode("utf-8", "replace") or "no reason given", None


def _seconds(retry_after: str | None) -> float:
    try:
        seconds = float(retry_after or 1.0)
    except ValueError:
        return 1.0
    return min(_LONGEST_RETRY_S, max(0.05, seconds)) if math.isfinite(seconds) else 1.0


def _piece(name: str, data: bytes) -> StreamedTokens | None:
    """Return the tokens of an event; None for one without any (usage, `[DONE]`). Raises ServerGoneError."""
    if data.strip() == b"[DONE]":
        return None
    try:
        body = msgspec.json.decode(data)
        if name == "error" or "error" in body:
            raise ServerGoneError(f"the instance failed: {_message(data)[0][:300]}")
        choices = body.get("choices") or []
        if not choices:
            return None
        tokens, finish = choices[0].get("token_ids"), choices[0].get("finish_reason")
        if tokens is None and finish is None and choices[0].get("text"):
            raise ServerGoneError("the instance sends no `token_ids`: it has to know vLLM's `return_token_ids`")
        return StreamedTokens(tuple(tokens or ()), finish)
    except (msgspec.DecodeError, AttributeError, KeyError, TypeError) as error:
        raise ServerGoneError(f"the instance sent what is no chunk of an answer ({error!r})") from None
