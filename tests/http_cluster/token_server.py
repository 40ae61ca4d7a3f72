"""A server with vLLM's HTTP API inside the test's event loop: tokens follow from those before them, faults are set from
outside."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

VOCABULARY = 256


def next_token(tokens: list[int]) -> int:
    """The greedy answer's next token: of all tokens before it, never an end token (0 or 1)."""
    value = 7
    for token in tokens[-24:]:
        value = (value * 31 + token + 11) % 100_003
    return 2 + (value + len(tokens)) % (VOCABULARY - 2)


def greedy(prompt: list[int], count: int) -> list[int]:
    """The answer that every server gives."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


@dataclass
class Held:
    """One request on the server."""

    body: dict[str, Any]
    headers: dict[str, str]
    sent: int = 0
    ended: str = ""
    """How: `finished`, `aborted` (the client closed), `broken` (this server did)."""


@dataclass
class TokenServer:
    """`prefill_s`: seconds a prompt token; `gap_s`: a token. `break_after`: tokens after which a stream is cut, of
    `breaks` streams. `pause_at`: tokens after which streams wait until it is None. `busy`: requests that still get 429.
    `frozen`: nothing answers."""

    prefill_s: float = 0.0
    gap_s: float = 0.0
    break_after: int | None = None
    breaks: int = 1_000_000
    pause_at: int | None = None
    busy: int = 0
    frozen: bool = False
    end_token_at: int | None = None
    max_model_len: int = 4096
    seen: list[Held] = field(default_factory=list)
    kept: set[str] = field(default_factory=set)
    """Request ids whose KV waits to be read by another server."""
    peers: list[TokenServer] = field(default_factory=list)
    """Servers whose KV this one can read."""
    running: int = 0
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> TokenServer:
        app = web.Application(client_max_size=1 << 26)
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/v1/models", self._models),
                web.get("/metrics", self._metrics),
                web.post("/v1/completions", self._complete),
            ]
        )
        self._runner = web.AppRunner(app, shutdown_timeout=0.01, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def stop(self) -> None:
        """As a kill: connections close in the midst of answers. `start` serves again on the same port. Harmless when
        repeated."""
        if self._runner.server is None:
            return
        for held in self.seen:
            held.ended = held.ended or "broken"
        for connection in list(self._runner.server.connections):
            if connection.transport is not None:
                connection.transport.abort()
        await self._runner.cleanup()
        self.running = 0

    async def _thaw(self) -> None:
        while self.frozen:
            await asyncio.sleep(0.01)

    async def _health(self, request: web.Request) -> web.Response:
        await self._thaw()
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tokens", "max_model_len": self.max_model_len}]})

    async def _metrics(self, request: web.Request) -> web.Response:
        lines = [
            'vllm:cache_config_info{block_size="16",num_gpu_blocks="1024",engine="0"} 1.0',
            f'vllm:num_requests_running{{engine="0"}} {self.running}',
            'vllm:num_requests_waiting{engine="0"} 0.0',
            'vllm:kv_cache_usage_perc{engine="0"} 0.25',
        ]
        return web.Response(text="\n".join(lines) + "\n")

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        held = Held(body, {name.lower(): value for name, value in request.headers.items()})
        self.seen.append(held)
        if self.busy:
            self.busy -= 1
            error = {"error": {"message": "full", "type": "overloaded", "param": None, "code": 429}}
            return web.json_response(error, status=429, headers={"Retry-After": "0.05"})
        if len(body["prompt"]) + body["max_tokens"] > self.max_model_len:
            return web.json_response({"error": {"message": "too long", "param": "prompt"}}, status=400)
        if "kv_transfer_params" in body and not body["stream"]:
            return await self._prefill(held)
        self.running += 1
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        try:
            await response.prepare(request)
            await asyncio.sleep(self.prefill_s * len(body["prompt"]))
            self._read(held)
            await self._stream(request, response, held)
        except (asyncio.CancelledError, ConnectionError):
            held.ended = held.ended or "aborted"
            raise
        finally:
            self.running -= 1
        return response

    async def _prefill(self, held: Held) -> web.Response:
        """The prefill leg of vLLM's NixlConnector."""
        assert held.body["kv_transfer_params"]["do_remote_decode"]
        assert held.body["max_tokens"] == 1
        name = held.headers["x-request-id"]
        self.running += 1
        try:
            await asyncio.sleep(self.prefill_s * len(held.body["prompt"]))
        except asyncio.CancelledError:
            held.ended = "aborted"
            raise
        finally:
            self.running -= 1
        held.ended = "finished"
        self.kept.add(name)
        parameters = {"do_remote_prefill": True, "remote_request_id": name, "remote_port": self.port, "extra": [[1]]}
        return web.json_response({"choices": [], "kv_transfer_params": parameters})

    def _read(self, held: Held) -> None:
        """Read KV that the request's parameters name, which frees it there."""
        parameters = held.body.get("kv_transfer_params")
        if parameters is not None:
            assert parameters["extra"] == [[1]]
            source = next(each for each in self.peers if each.port == parameters["remote_port"])
            source.kept.remove(held.headers["x-request-id"])

    async def _stream(self, request: web.Request, response: web.StreamResponse, held: Held) -> None:
        tokens, count = list(held.body["prompt"]), held.body["max_tokens"]
        for i in range(count):
            await self._thaw()
            while i == self.pause_at:
                await asyncio.sleep(0.01)
            if i == self.break_after and self.breaks:
                self.breaks -= 1
                held.ended = "broken"
                assert request.transport is not None
                request.transport.abort()
                return
            finish = "length" if i == count - 1 else None
            if self.end_token_at is not None and len(tokens) >= self.end_token_at:
                token, finish = 1, "stop"
            else:
                token = next_token(tokens)
            tokens.append(token)
            choice = {"index": 0, "text": "", "token_ids": [token], "finish_reason": finish}
            if finish is not None:
                held.ended = "finished"
            await response.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
            held.sent += 1
            if finish is not None:
                break
            await asyncio.sleep(self.gap_s)
        await response.write(b"data: [DONE]\n\n")


async def _serve(port: int) -> None:
    await TokenServer(port=port).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1])))
