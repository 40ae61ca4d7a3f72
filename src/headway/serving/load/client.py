"""One request to an OpenAI endpoint, streamed, and the record of what happened to it.

There is no limit on connections: how many requests are open at a time is the server's doing, not ours (open loop).
Each request has a connection of its own, so that none fails because a kept one was closed under it.
"""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import msgspec

from headway.serving.load.sse import SseParser
from headway.serving.load.stream import StreamedAnswer
from headway.sim.metrics import NO_TARGETS, RequestRecord, SloTargets

if TYPE_CHECKING:
    import aiohttp

Clock = Callable[[], float]


@dataclass(frozen=True, kw_only=True)
class TargetEndpoint:
    """Where requests go. `base_url` is the server's root or its /v1; `timeout_s` bounds one whole request, if given.

    `extensions` sends what vLLM and Headway understand beyond OpenAI's own API: `ignore_eos`, `min_tokens` and usage in
    every chunk (exact token counts). Without them a chunk counts as one token and answers may end early.
    """

    base_url: str
    model: str
    api_key: str | None = None
    timeout_s: float | None = 3600.0
    extensions: bool = True
    send_slo: bool = False
    headers: dict[str, str] = field(default_factory=dict)

    def path(self, name: str) -> str:
        """The address of `name` under /v1."""
        root = self.base_url.rstrip("/").removesuffix("/v1")
        return f"{root}/v1/{name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """One request to make. `prompt` is JSON text: an array of ids, or a string; `due_s` is on the run's clock."""

    id: str
    prompt: bytes
    prompt_tokens: int
    output_tokens: int
    klass: str = "all"
    due_s: float = 0.0
    slo: SloTargets = NO_TARGETS
    ignore_eos: bool = True
    keep_text: bool = False


def text_prompt(text: str) -> bytes:
    """A text as the JSON that `LoadRequest.prompt` wants."""
    return msgspec.json.encode(text)


def request_body(endpoint: TargetEndpoint, job: LoadRequest) -> bytes:
    """The request's body; the prompt's JSON is spliced in, never parsed or encoded again."""
    options: dict[str, Any] = {"include_usage": True}
    body: dict[str, Any] = {
        "model": endpoint.model,
        "max_tokens": job.output_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": options,
    }
    if endpoint.extensions:
        options["continuous_usage_stats"] = True
        if job.ignore_eos:
            body["ignore_eos"] = True
            body["min_tokens"] = job.output_tokens
    return msgspec.json.encode(body)[:-1] + b',"prompt":' + job.prompt + b"}"


def request_headers(endpoint: TargetEndpoint, job: LoadRequest) -> dict[str, str]:
    """The request's headers: key, request id, and the objectives where the endpoint is to know them."""
    headers = {
        "Content-Type": "application/json",
        "Accept-Encoding": "identity",
        "X-Request-Id": job.id,
    }
    if endpoint.api_key:
        headers["Authorization"] = f"Bearer {endpoint.api_key}"
    if endpoint.send_slo:
        gap = job.slo.tbt_s if job.slo.tbt_s is not None else job.slo.tpot_s
        if job.slo.ttft_s is not None:
            headers["x-llm-d-slo-ttft-ms"] = f"{job.slo.ttft_s * 1000:g}"
        if gap is not None:
            headers["x-llm-d-slo-tpot-ms"] = f"{gap * 1000:g}"
    return {**headers, **endpoint.headers}


class LoadClient:
    """Sends jobs to one endpoint. Use it as an async context manager; its clock starts at zero when it is entered."""

    def __init__(self, endpoint: TargetEndpoint, clock: Clock = time.perf_counter) -> None:
        self.endpoint = endpoint
        self._clock = clock
        self._origin = 0.0
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        import aiohttp

        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=30),
        )
        self._origin = self._clock()
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._session is not None:
            await self._session.close()

    def now(self) -> float:
        """Seconds on the run's clock, the one of `LoadRequest.due_s` and of every record."""
        return self._clock() - self._origin

    def restart_clock(self) -> None:
        """Let the run's clock start at zero now."""
        self._origin = self._clock()

    async def send(self, job: LoadRequest, on_first_token: Callable[[float], None] | None = None) -> RequestRecord:
        """Send one job now and follow it to its end. Always returns a record: whatever goes wrong is its `error`.

        Errors read `reason: details`; the reason has few values and is what reports count by. A cancelled request is
        recorded as such too, and the cancellation ends here.
        """
        answer = StreamedAnswer(on_first_token)
        sent_s = self.now()
        error: str | None
        try:
            async with asyncio.timeout(self.endpoint.timeout_s):
                error = await self._exchange(job, answer)
        except TimeoutError:
            error = f"timeout: no end within {self.endpoint.timeout_s} s"
        except asyncio.CancelledError:
            error = "cancelled: the run was stopped"
        except Exception as problem:  # the record must exist, whatever the network or the server came up with
            error = f"{type(problem).__name__}: {problem}"
        return answer.record(job, sent_s=sent_s, finish_s=self.now(), error=error)

    async def _exchange(self, job: LoadRequest, answer: StreamedAnswer) -> str | None:
        assert self._session is not None, "enter the client first"
        async with self._session.post(
            self.endpoint.path("completions"),
            data=io.BytesIO(request_body(self.endpoint, job)),
            headers=request_headers(self.endpoint, job),
        ) as response:
            if response.status != 200:
                return f"HTTP {response.status}: {error_message(await response.read())}"
            parser = SseParser()
            async for chunk in response.content.iter_any():
                now = self.now()
                for event in parser.feed(chunk):
                    answer.take(event, now)
        return answer.verdict()


def error_message(body: bytes) -> str:
    """The message of an OpenAI error object (or of FastAPI's), else the start of the body."""
    try:
        value = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return body[:300].decode("utf-8", "replace")
    if isinstance(value, dict):
        inner = value.get("error", value)
        if isinstance(inner, dict):
            return str(inner.get("message") or inner.get("detail") or inner)[:300]
        return str(inner)[:300]
    return str(value)[:300]
