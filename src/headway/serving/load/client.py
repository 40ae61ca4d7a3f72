"""Client of an OpenAI endpoint: one streamed request and its record, sent in an open loop or in sessions.

The number of connections is unlimited, because in an open loop only the server decides how many requests are open. Each
request has its own connection, so that none fails because a reused one was closed by the server.
"""

from __future__ import annotations

import asyncio
import io
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from typing import TYPE_CHECKING, Any, Self

import msgspec

from headway.core.errors import ConfigError
from headway.core.sse import SseEvent, SseParser
from headway.sim.metrics import NO_TARGETS, RequestRecord, SloTargets
from headway.sim.workload import TraceRequest

if TYPE_CHECKING:
    import aiohttp


# Finish reasons that count as success.
GOOD_ENDS = frozenset({"stop", "length", "tool_calls", "content_filter"})


class StreamedAnswer:
    """Collector of one answer. A chunk's token count is the growth of its usage, else the number of its ids, else one.

    Tokens that only the final usage counts (a server may hold text back) get the time of the last chunk.
    """

    def __init__(self, on_first_token: Callable[[float], None] | None = None) -> None:
        self._on_first_token = on_first_token
        self._token_s: list[float] = []
        self._texts: list[str] = []
        self._ids: list[int] = []
        self._last_chunk_s: float | None = None
        self._usage: dict[str, Any] = {}
        self._finish_reason: str | None = None
        self._done = False
        self._error: str | None = None

    def take(self, event: SseEvent, now: float) -> None:
        """Add one event that arrived at `now`, in seconds on the run's clock."""
        if event.data.strip() == b"[DONE]":
            self._done = True
            return
        try:
            body = msgspec.json.decode(event.data)
        except msgspec.DecodeError:
            self._error = self._error or f"bad chunk: {event.data[:100]!r}"
            return
        if not isinstance(body, dict):
            self._error = self._error or f"bad chunk: {event.data[:100]!r}"
        elif event.name == "error" or body.get("error"):
            inner = body.get("error") or body
            message = inner.get("message", inner) if isinstance(inner, dict) else inner
            self._error = self._error or f"error event: {str(message)[:300]}"
        else:
            self._chunk(body, now)

    def _chunk(self, body: dict[str, Any], now: float) -> None:
        usage = body.get("usage") or {}
        self._usage = usage or self._usage
        choices = body.get("choices") or []
        # A last chunk with usage only.
        if not choices:
            return
        choice = choices[0]
        text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
        ids = choice.get("token_ids")
        self._ids += ids if isinstance(ids, list) else []
        reason = choice.get("finish_reason")
        if "completion_tokens" in usage:
            # Usage is cumulative: the growth since the last chunk.
            count = max(0, int(usage["completion_tokens"]) - len(self._token_s))
        elif isinstance(ids, list):
            count = len(ids)
        else:
            # A completions chunk with empty text is a token in parts; a chat chunk without content has the role only.
            count = 1 if text or (reason is None and "text" in choice) else 0
        self._arrived(count, now)
        self._last_chunk_s = now
        self._texts.append(text)
        self._finish_reason = reason or self._finish_reason

    def _arrived(self, count: int, now: float) -> None:
        if count and not self._token_s and self._on_first_token is not None:
            self._on_first_token(now)
        self._token_s.extend([now] * count)

    def verdict(self) -> str | None:
        """Return what was wrong with the answer, or None; called when the stream has ended."""
        if self._error is not None:
            return self._error
        if self._finish_reason is None and not self._done:
            return "stream ended early: neither a finish reason nor [DONE]"
        if self._finish_reason is not None and self._finish_reason not in GOOD_ENDS:
            return f"finished by {self._finish_reason}: after {len(self._token_s)} tokens"
        if not self._token_s and not self._usage.get("completion_tokens"):
            return "no output token: the answer is empty"
        return None

    def record(self, job: LoadRequest, *, sent_s: float, finish_s: float, error: str | None) -> RequestRecord:
        """Make the record of the answer to `job`. Times in seconds on the run's clock."""
        counted = int(self._usage.get("completion_tokens") or 0)
        if self._last_chunk_s is not None and counted > len(self._token_s):
            self._arrived(counted - len(self._token_s), self._last_chunk_s)
        if job.answer_ids is not None:
            job.answer_ids.extend(self._ids)
        details = self._usage.get("prompt_tokens_details") or {}
        return RequestRecord(
            id=job.id,
            klass=job.klass,
            arrival_s=job.due_s,
            sent_s=sent_s,
            prompt_tokens=int(self._usage.get("prompt_tokens") or job.prompt_tokens),
            output_tokens=len(self._token_s),
            token_s=tuple(self._token_s),
            finish_s=finish_s,
            slo=job.slo,
            finish_reason=self._finish_reason,
            error=error,
            text="".join(self._texts) if job.keep_text else None,
            cached_tokens=int(details.get("cached_tokens") or 0),
        )


def server_root(base_url: str) -> str:
    """Return a server's address without a final /v1. Raises ConfigError for anything but http:// and https://."""
    if not base_url.startswith(("http://", "https://")):
        raise ConfigError(f"{base_url!r} is not an address of a server: write it like http://127.0.0.1:8000")
    return base_url.rstrip("/").removesuffix("/v1")


def ask(
    method: str, url: str, api_key: str | None, body: dict[str, Any] | None = None, timeout_s: float | None = None
) -> dict[str, Any]:
    """Return a server's answer to a request. Raises ConfigError with the server's own words where it refuses.

    timeout_s: silence of the server after which it counts as not answering; None: never."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
    data = None if body is None else json.dumps(body).encode()
    try:
        request = urllib.request.Request(url, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            answer = json.load(response)
            if not isinstance(answer, dict):
                raise ValueError("no JSON object")
            return answer
    except urllib.error.HTTPError as refusal:
        try:
            why = f"the server refuses it: {json.load(refusal)['error']['message']}"
        except (OSError, HTTPException, ValueError, KeyError, TypeError):
            why = f"the server answers {refusal.code} {refusal.reason} to {url}: it is none of this version"
        raise ConfigError(why) from None
    except (OSError, HTTPException, ValueError) as problem:
        raise ConfigError(f"{url} does not answer ({problem}); is a server there?") from None


def first_model(base_url: str, api_key: str | None = None) -> dict[str, Any]:
    """Return the first entry of /v1/models; its `id` is the name to send. Raises ConfigError when there is none."""
    url = f"{server_root(base_url)}/v1/models"
    entries = ask("GET", url, api_key, timeout_s=10.0).get("data")
    if not isinstance(entries, list) or not entries or not isinstance(entries[0], dict) or "id" not in entries[0]:
        raise ConfigError(f"{url} lists no model; name one with --model")
    return dict(entries[0])


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
    return headers


class LoadClient:
    """Sends jobs to one endpoint. Use it as an async context manager; its clock starts at zero when it is entered."""

    def __init__(self, endpoint: TargetEndpoint) -> None:
        self.endpoint = endpoint
        self._origin = 0.0
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        import aiohttp

        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=30),
        )
        self._origin = time.perf_counter()
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._session is not None:
            await self._session.close()

    def now(self) -> float:
        """Return seconds on the run's clock, to which `LoadRequest.due_s` and all records refer."""
        return time.perf_counter() - self._origin

    def restart_clock(self) -> None:
        """Restart the run's clock at zero."""
        self._origin = time.perf_counter()

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


@dataclass(frozen=True)
class LoadResult:
    """Result of a load run."""

    records: list[RequestRecord]
    """One per request, in order."""
    interrupted: bool = False
    """Whether the run was stopped before its end."""


def not_sent(job: LoadRequest) -> RequestRecord:
    """Return the record of a request that was not sent."""
    return RequestRecord(
        id=job.id,
        klass=job.klass,
        arrival_s=job.due_s,
        prompt_tokens=job.prompt_tokens,
        slo=job.slo,
        error="not sent: the run was stopped",
    )


async def run_requests(
    client: LoadClient,
    requests: Sequence[TraceRequest],
    prompt: Callable[[TraceRequest], bytes],
    make: Callable[[int, TraceRequest, bytes, float], LoadRequest],
    answered: Callable[[TraceRequest, list[int]], None] = lambda request, ids: None,
    on_sent: Callable[[], None] = lambda: None,
    on_done: Callable[[RequestRecord], None] = lambda record: None,
) -> LoadResult:
    """Send each request when it is due, however many are open; return one record per request, in their order.

    A request is due at its arrival, or, where it waits (`transforms.close_sessions`), its think time after the answer,
    or the failure, of the one before it in its thread. A late client sends at once and never skips: the delay is part
    of the latency and of `send_lag`. prompt: makes a request's prompt as JSON, once it is due. make: returns what to
    send, from the request's number, the request, its prompt and its due time on the client's clock, which starts at
    zero here. answered: called with the ids of an answer, where they were asked for. When the task is cancelled
    (Ctrl-C), open requests are recorded as cancelled and the others as not sent.
    """
    client.restart_clock()
    threads: list[list[int]] = []
    latest: dict[tuple[str | None, str], list[int]] = {}
    for number, request in enumerate(requests):
        if not request.waits:
            threads.append([])
            latest[request.session, request.thread] = threads[-1]
        latest[request.session, request.thread].append(number)
    records: dict[int, RequestRecord] = {}

    async def play(numbers: Sequence[int]) -> None:
        ended_s = 0.0
        for number in numbers:
            request = requests[number]
            due_s = ended_s + (request.think_s or 0.0) if request.waits else request.arrival_s
            await asyncio.sleep(max(0.0, due_s - client.now()))
            job = make(number, request, prompt(request), due_s)
            on_sent()
            # A cancelled request has a record too: `send` does not raise.
            record = records[number] = await client.send(job)
            if job.answer_ids:
                answered(request, job.answer_ids)
            on_done(record)
            if (task := asyncio.current_task()) is not None and task.cancelling():
                return
            ended_s = client.now()

    stopped = False
    try:
        async with asyncio.TaskGroup() as group:
            for numbers in threads:
                group.create_task(play(numbers))
    except asyncio.CancelledError:
        stopped = True
    left = (number for number in range(len(requests)) if number not in records)
    for number in left:
        records[number] = not_sent(make(number, requests[number], b"", requests[number].arrival_s))
    return LoadResult([records[number] for number in range(len(requests))], stopped)
