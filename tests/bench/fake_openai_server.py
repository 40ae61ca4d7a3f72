"""A small OpenAI server with scripted delays, started by tests as a process of its own, as `headway serve` would be.

Whole prompts: one request at a time, first come first served. Chunks: longs are read beside shorts, which do not wait.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from typing import Any

from aiohttp import web

LONG = 2000
BLOCK = 16


def usage_of(prompt: int, output: int) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}


class Fake:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.lock = asyncio.Lock()
        self.seen: list[dict] = []
        self.started = time.monotonic()
        self.cached: set[tuple[int, ...]] = set()

    async def ready(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if time.monotonic() - self.started > 0.1 else 503)

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response(
            {"object": "list", "data": [{"id": "fake", "object": "model", "max_model_len": self.args.max_model_len}]}
        )

    async def requests(self, request: web.Request) -> web.Response:
        return web.json_response(self.seen)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        return await self.answered(request, body, self.hit(body["prompt"]) if self.args.cache else 0)

    def hit(self, prompt: list[int]) -> int:
        """Return how many tokens whole blocks of earlier prompts and answers cover; the last one is computed."""
        ends = range(BLOCK, len(prompt), BLOCK)
        return next((end - BLOCK for end in ends if tuple(prompt[:end]) not in self.cached), len(ends) * BLOCK)

    def keep(self, tokens: list[int]) -> None:
        self.cached.update(tuple(tokens[:end]) for end in range(BLOCK, len(tokens) + 1, BLOCK))

    async def answered(self, request: web.Request, body: dict, cached: int) -> web.StreamResponse:
        prompt, count = body["prompt"], body["max_tokens"]
        length = len(prompt) if isinstance(prompt, list) else len(prompt) // 4
        self.seen.append({"tokens": length, "headers": {k.lower(): v for k, v in request.headers.items()}})
        answer: list[int] = []
        number = len(self.seen)
        mode = self.args.mode
        if mode == "refuse" and len(self.seen) % 2 == 0:
            error = {"message": "the queue is full", "type": "overloaded", "param": None, "code": 429}
            return web.json_response({"error": error}, status=429, headers={"Retry-After": "1"})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b": keep-alive\n\n")
        delay = length / self.args.speed
        if self.args.chunking == "whole":
            async with self.lock:
                await asyncio.sleep(delay)
        else:
            await asyncio.sleep(delay)
        sent = 0
        while sent < count:
            step = min(self.args.chunk_tokens, count - sent)
            sent += step
            finish = "length" if sent == count else None
            text = "x" * step if not self.args.answer else self.args.answer if sent == step else ""
            ids = [number] * step
            answer += ids
            choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": finish}
            chunk: dict[str, Any] = {"id": "c", "object": "text_completion", "model": "fake", "choices": [choice]}
            if body.get("return_token_ids"):
                choice["token_ids"] = ids
            if body.get("stream_options", {}).get("continuous_usage_stats"):
                chunk["usage"] = usage_of(length, sent)
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\r\n\r\n")
            if mode == "cut" and sent * 2 >= count:
                request.transport.close()
                return response
            if mode == "error-event" and sent * 2 >= count:
                await response.write(b'data: {"error": {"message": "worker lost", "type": "server_error"}}\n\n')
                return response
            await asyncio.sleep(self.args.gap)
        usage = usage_of(length, count)
        if self.args.cache:
            self.keep(prompt + answer)
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        await response.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--scheduling-policy", default="lars")
    parser.add_argument("--chunking", default="adaptive")
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--speed", type=float, default=10000.0, help="prompt tokens per second")
    parser.add_argument("--gap", type=float, default=0.002)
    parser.add_argument("--chunk-tokens", type=int, default=1)
    parser.add_argument("--answer", default="")
    parser.add_argument("--cache", action="store_true", help="report which blocks of prompts were there before")
    parser.add_argument("--mode", default="good", choices=["good", "refuse", "cut", "error-event", "die"])
    args = parser.parse_args()
    if args.mode == "die":
        print("cannot load the model: weights are missing", file=sys.stderr)
        raise SystemExit(3)
    fake = Fake(args)
    app = web.Application(client_max_size=1 << 28)
    for path, handler in (("/ready", fake.ready), ("/v1/models", fake.models), ("/requests", fake.requests)):
        app.router.add_get(path, handler)
    app.router.add_post("/v1/completions", fake.completions)
    web.run_app(app, host="127.0.0.1", port=args.port, print=None, shutdown_timeout=0.1)


if __name__ == "__main__":
    main()
