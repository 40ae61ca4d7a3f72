"""ASGI middleware of vLLM's API server: latency targets in headers become `vllm_xargs` of the body, where the scheduler
reads them.

SLO headers become `vllm_xargs` of the body, where the scheduler reads them.

vllm serve MODEL --scheduler-cls headway.vllm.Scheduler --middleware headway.vllm.SloMiddleware
"""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from headway.core.request import Slo

TTFT_ARGUMENT, TPOT_ARGUMENT = "slo_ttft_ms", "slo_tpot_ms"
HEADERS = {
    b"x-llm-d-slo-ttft-ms": TTFT_ARGUMENT,
    b"x-slo-ttft-ms": TTFT_ARGUMENT,
    b"x-llm-d-slo-tpot-ms": TPOT_ARGUMENT,
    b"x-slo-tpot-ms": TPOT_ARGUMENT,
}
"""Argument by header. Of two headers of one argument the first in this table wins."""
_LONGEST_MS = 1e12


def milliseconds(value: object) -> float | None:
    """The value as a number of milliseconds above 0; None where it is not one."""
    try:
        number = float(value[:40] if isinstance(value, str | bytes) else value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) and 0 < number <= _LONGEST_MS else None


def read_slo(extra_args: Mapping[str, Any] | None) -> Slo:
    """What a request's `sampling_params.extra_args` ask for. Values that are not times are ignored: a scheduler has no
    way to refuse a request."""
    if not extra_args:
        return Slo()
    ttft = milliseconds(extra_args.get(TTFT_ARGUMENT))
    tpot = milliseconds(extra_args.get(TPOT_ARGUMENT))
    return Slo(ttft_s=None if ttft is None else ttft / 1000, tbt_s=None if tpot is None else tpot / 1000)


AsgiMessage = MutableMapping[str, Any]
AsgiReceive = Callable[[], Awaitable[AsgiMessage]]
AsgiSend = Callable[[AsgiMessage], Awaitable[None]]
AsgiApp = Callable[[MutableMapping[str, Any], AsgiReceive, AsgiSend], Awaitable[None]]


class SloMiddleware:
    """Requests without these headers pass untouched. A header that is not a time is answered with status 400."""

    def __init__(self, app: AsgiApp) -> None:
        self._app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: AsgiReceive, send: AsgiSend) -> None:
        """Called by the server for each connection."""
        headers = dict(scope.get("headers", ())) if scope["type"] == "http" and scope["method"] == "POST" else {}
        found = [name for name in HEADERS if name in headers]
        if not found:
            await self._app(scope, receive, send)
            return
        arguments: dict[str, float] = {}
        for name in found:
            value = milliseconds(headers[name])
            if value is None:
                await _refuse(send, f"header '{name.decode()}' must be a number of milliseconds above 0")
                return
            arguments.setdefault(HEADERS[name], value)
        body = add_arguments(await _read(receive), arguments)
        # The body has grown: the old length, or chunked encoding, no longer applies.
        length = [(b"content-length", str(len(body)).encode())]
        rest = [(k, v) for k, v in scope["headers"] if k not in (b"content-length", b"transfer-encoding")]
        await self._app({**scope, "headers": rest + length}, _replay(body, receive), send)


def add_arguments(body: bytes, arguments: dict[str, float]) -> bytes:
    """The JSON object with `arguments` in its `vllm_xargs`. What is not a JSON object is left for the server to refuse.

    A long prompt is not parsed: text is spliced in, unless the body has a `vllm_xargs` of its own to be merged with.
    """
    if b'"vllm_xargs"' in body:
        try:
            parsed = json.loads(body)
        except ValueError:
            return body
        if not isinstance(parsed, dict):
            return body
        own = parsed.get("vllm_xargs") or {}
        if isinstance(own, dict):
            parsed["vllm_xargs"] = {**own, **arguments}
        return json.dumps(parsed).encode()
    start = body.lstrip(b" \t\r\n")
    if not start.startswith(b"{"):
        return body
    rest = start[1:].lstrip(b" \t\r\n")
    comma = b"" if rest.startswith(b"}") else b","
    return b'{"vllm_xargs":' + json.dumps(arguments).encode() + comma + rest


async def _read(receive: AsgiReceive) -> bytes:
    """The whole body: the server reads all of it before it parses, so nothing waits longer."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return b"".join(parts)
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def _replay(body: bytes, receive: AsgiReceive) -> AsgiReceive:
    """Return a `receive` that yields the body, then the connection's own messages (a disconnect)."""
    pending: list[AsgiMessage] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> AsgiMessage:
        return pending.pop() if pending else await receive()

    return replay


async def _refuse(send: AsgiSend, message: str) -> None:
    error = {"error": {"message": message, "type": "BadRequestError", "param": None, "code": 400}}
    body = json.dumps(error).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": body})
