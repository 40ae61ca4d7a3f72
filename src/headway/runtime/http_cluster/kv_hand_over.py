"""Prefill on one vLLM server and decode on another: the `kv_transfer_params` protocol of vLLM's NixlConnector.

The prefill leg asks for one token and is answered with parameters; the decode leg carries them unchanged, and both have
the same `X-Request-Id`. The decode server reads the KV, after which the prefill server frees it. Roles belong to the
request: any server with the connector can have either.

When the client leaves during the prefill leg, that connection is closed, which ends the prefill. Once the prefill
server has answered it keeps the KV until it is read or its lease ends, so the decode leg is carried on to its first
token and only then closed. An answer that crosses the closing of its connection stays: that KV is freed by the lease.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from headway.runtime.http_cluster.http_server import HttpServer, StreamedTokens

LEASE_S = 30.0
"""vLLM's default `kv_lease_duration`: an abandoned decode leg is not carried on for longer."""
_NOT_FOR_PREFILL = ("stream", "stream_options", "min_tokens", "return_token_ids")
_REMOTE_DECODE: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
_running: set[asyncio.Task[None]] = set()
"""The event loop keeps weak references only."""


def prefill_body(body: dict[str, Any]) -> dict[str, Any]:
    """Return the body of the prefill leg of a completion."""
    kept = {name: value for name, value in body.items() if name not in _NOT_FOR_PREFILL}
    return kept | {"stream": False, "max_tokens": 1, "kv_transfer_params": _REMOTE_DECODE}


class KvHandOver:
    """Both legs of one request, in a task that outlives its reader where KV would be stranded."""

    def __init__(self, prefill: HttpServer, decode: HttpServer, body: dict[str, Any], headers: dict[str, str]) -> None:
        """body: of the whole completion. The prefill leg begins at once. Needs a running event loop."""
        self._prefill, self._decode, self._body, self._headers = prefill, decode, body, headers
        self._pieces: asyncio.Queue[StreamedTokens | Exception] = asyncio.Queue()
        self._unread = False
        """Whether the prefill server keeps KV that the decode server has not read."""
        self._left = False
        self._task = asyncio.get_running_loop().create_task(self._run())
        _running.add(self._task)
        self._task.add_done_callback(_running.discard)

    async def pieces(self) -> AsyncIterator[StreamedTokens]:
        """Stream the answer, as `HttpServer.complete` does and with its errors. The prefill leg's answer comes as a
        piece without tokens. Closing the iterator ends the request."""
        try:
            while True:
                piece = await self._pieces.get()
                if isinstance(piece, Exception):
                    raise piece
                yield piece
                if piece.finish is not None:
                    return
        finally:
            self.leave()

    def leave(self) -> None:
        """End the request, with its KV freed. Harmless when repeated."""
        if self._left or self._task.done():
            return
        self._left = True
        if self._unread:
            asyncio.get_running_loop().call_later(LEASE_S, self._task.cancel)
        else:
            self._task.cancel()

    async def _run(self) -> None:
        try:
            parameters = await self._prefill.prefill(prefill_body(self._body), self._headers)
            self._unread = True
            self._pieces.put_nowait(StreamedTokens())
            body = self._body | {"kv_transfer_params": parameters}
            async with aclosing(self._decode.complete(body, self._headers)) as answer:  # type: ignore[type-var]
                async for piece in answer:
                    # The first token comes after the KV.
                    self._unread = self._unread and not piece.tokens and piece.finish is None
                    self._pieces.put_nowait(piece)
                    if self._left and not self._unread:
                        return
        except Exception as error:
            self._pieces.put_nowait(error)
