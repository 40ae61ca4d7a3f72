"""Drives an ASGI application by hand: the test decides when the client reads, stalls or leaves."""

from __future__ import annotations

import asyncio
import json
from typing import Any


class Caller:
    """One HTTP request to `app`. `stall` stops the client's reading until `resume`; `leave` closes its connection."""

    def __init__(self, app: Any, path: str, body: object, headers: dict[str, str] | None = None) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1",
            "method": "POST", "path": path, "raw_path": path.encode(), "root_path": "", "scheme": "http",
            "query_string": b"", "headers": [(b"content-type", b"application/json")]
            + [(key.lower().encode(), value.encode()) for key, value in (headers or {}).items()],
            "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80),
        }  # fmt: skip
        self.status: int | None = None
        self.received = b""
        self.ended = False
        self._body: list[bytes] = [data]
        self._gone = asyncio.Event()
        self._reading = asyncio.Event()
        self._reading.set()
        self._changed = asyncio.Condition()
        self.task = asyncio.create_task(app(self.scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._body:
            return {"type": "http.request", "body": self._body.pop(), "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        await self._reading.wait()
        async with self._changed:
            if message["type"] == "http.response.start":
                self.status = message["status"]
            else:
                self.received += message.get("body", b"")
                self.ended = not message.get("more_body", False)
            self._changed.notify_all()

    def stall(self) -> None:
        self._reading.clear()

    def resume(self) -> None:
        self._reading.set()

    def leave(self) -> None:
        self._gone.set()

    async def until(self, text: bytes, count: int = 1) -> None:
        """Wait until `text` has been received `count` times."""
        async with asyncio.timeout(10), self._changed:
            await self._changed.wait_for(lambda: self.received.count(text) >= count)

    async def done(self) -> None:
        async with asyncio.timeout(10):
            await self.task

    def events(self) -> list[Any]:
        """The JSON of all `data:` events but [DONE]."""
        lines = [line[6:] for line in self.received.split(b"\n\n") if line.startswith(b"data: ")]
        return [json.loads(line) for line in lines if line != b"[DONE]"]
