"""Client of an OpenAI endpoint: sends one streamed request and returns its record.

The number of connections is unlimited, because in an open loop only the server decides how many requests are open. Each
request has its own connection, so that none fails because a reused one was closed by the server.
"""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import msgspec

from headway.core.sse import SseParser
from headway.serving.load.endpoint import server_root
from headway.serving.load.stream import StreamedAnswer
from headway.sim.metrics import NO_TARGETS, RequestRecord, SloTargets

if TYPE_CHECKING:
    import aiohttp

Clock = Callable[[], float]


@dataclass(frozen=True, kw_only=True)
class TargetEndpoint:
    """Address of a server and the way to use it."""

    base_url: str
    """The server's root, or its /v1."""
    model: str
    api_key: str | None = None
    timeout_s: float | None = 3600.0
    """Limit of one whole request; None: no limit."""
    extensions: bool = True
    """Whether to send fields beyond OpenAI's API: `ignore_eos`, `min_tokens`, usage in every chunk.

    Without them answers may end early, and a chunk counts as one token.
    """
    send_slo: bool = False
    """Whether to send a request's objectives as headers."""
    headers: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise ConfigError for an address that is none: once, not per request."""
        server_root(self.base_url)

    def path(self, name: str) -> str:
        """Return the URL of `name` under /v1."""
        return f"{server_root(self.base_url)}/v1/{name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """One request to send."""

    id: str
    prompt: bytes
    """JSON text: an array of token ids, or a string."""
    prompt_tokens: int
    output_tokens: int
    klass: str = "all"
    due_s: float = 0.0
    """Time to send it, in seconds on the run's clock."""
    slo: SloTargets = NO_TARGETS
    ignore_eos: bool = True
    """Whether the answer has exactly `output_tokens`, where the endpoint supports that."""
    keep_text: bool = False
    """Whether the record keeps the answer's text."""
    answer_ids: list[int] | None = None
    """Filled with the ids of the answer's tokens, where the endpoint sends them; None: they are not asked for."""


def text_prompt(text: str) -> bytes:
    """Encode a text as JSON, for `LoadRequest.prompt`."""
    return msgspec.json.encode(text)


def request_body(endpoint: TargetEndpoint, job: LoadRequest) -> bytes:
    """Return the request's body. The prompt's JSON is inserted as it is, without being parsed."""
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
        # Both together fix the length: the answer neither ends early nor exceeds max_tokens.
        if job.ignore_eos:
            body["ignore_eos"] = True
            body["min_tokens"] = job.output_tokens
        if job.answer_ids is not None:
            body["return_token_ids"] = True
    return msgspec.json.encode(body)[:-1] + b',"prompt":' + job.prompt + b"}"


def request_headers(endpoint: TargetEndpoint, job: LoadRequest) -> dict[str, str]:
    """Return the request's headers: API key, request id, and the objectives with `send_slo`."""
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
        """Return seconds on the run's clock, to which `LoadRequest.due_s` and all records refer."""
        return self._clock() - self._origin

    def restart_clock(self) -> None:
        """Restart the run's clock at zero."""
        self._origin = self._clock()

    async def send(self, job: LoadRequest, on_first_token: Callable[[float], None] | None = None) -> RequestRecord:
        """Send one request now and return its record at the end; a failure is the record's `error`.

        Errors have the form `reason: details`; reports count by the reason, which has few values. Cancellation is
        recorded like other errors and not raised again.
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
        except Exception as problem:  # every request must have a record, whatever went wrong
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
                # One timestamp per network chunk: parsing time is not part of a token's latency.
                now = self.now()
                for event in parser.feed(chunk):
                    answer.take(event, now)
        return answer.verdict()


def error_message(body: bytes) -> str:
    """Return the message of an OpenAI (or FastAPI) error object, else the start of the body."""
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
