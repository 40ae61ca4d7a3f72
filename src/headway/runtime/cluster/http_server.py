"""One HTTP server of a cluster: probes, metrics, completions, streamed answers, and the hand-over of KV between two
servers.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import re
import sys
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from headway.core.errors import HeadwayError, InvariantError, RequestError
from headway.core.sse import SseParser
from headway.runtime.engine.protocol import SubmitRequest

if TYPE_CHECKING:
    import aiohttp

    from headway.runtime.cluster.http_backend import HttpInstance
    from headway.runtime.cluster.requests import ClusterRequest


def begins_anew(submit: SubmitRequest) -> bool:
    """Return whether another attempt has to begin with the bare prompt: its penalties count output tokens alone."""
    return bool(submit.params.presence_penalty or submit.params.frequency_penalty)


def completion_body(
    submit: SubmitRequest, prompt: bytes | memoryview, model: str, output: Sequence[int]
) -> dict[str, Any]:
    """Return the JSON body. output: tokens of the answer that become part of the prompt.

    Every setting that a server could fill from a checkpoint's generation_config.json is given, so that instances agree.
    """
    ids = array("i", bytes(prompt))
    if sys.byteorder == "big":
        ids.byteswap()
    params = submit.params
    body: dict[str, Any] = {
        "model": model,
        "prompt": [*ids, *output],
        "max_tokens": params.max_tokens - len(output),
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k or -1,
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
        "stream": True,
        "return_token_ids": True,
    }
    optional = {
        "min_tokens": max(0, params.min_tokens - len(output)),
        # Greedy answers need none, and one that was drawn here promises nothing: an answer that goes on elsewhere does
        # not continue its random stream.
        "seed": params.seed if params.temperature and not params.seed_drawn else None,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "logit_bias": {str(token): bias for token, bias in params.logit_bias.items()},
        "ignore_eos": params.ignore_eos,
        "stop_token_ids": list(params.stop_token_ids),
        "priority": submit.priority,
        "cache_salt": sent_salt(submit),
    }
    return body | {name: value for name, value in optional.items() if value}


def sent_salt(submit: SubmitRequest) -> str:
    """Return the salt of all attempts at a request, of letters and digits alone, as vLLM demands; empty: none.

    A request that shares no prefix still finds its own after a pause."""
    salt = submit.cache_salt if submit.prefix_cache else f"{submit.cache_salt} {submit.id}"
    return hashlib.sha256(salt.encode()).hexdigest() if salt else ""


def request_headers(submit: SubmitRequest, send: int, api_key: str | None) -> dict[str, str]:
    """Return the headers of one completion: its id, SLOs, and the instances' key. send: its number."""
    headers = {"X-Request-Id": f"{submit.id}-{send}"}
    if submit.slo.ttft_s is not None:
        headers["x-llm-d-slo-ttft-ms"] = f"{submit.slo.ttft_s * 1e3:.3f}"
    if submit.slo.tbt_s is not None:
        headers["x-llm-d-slo-tpot-ms"] = f"{submit.slo.tbt_s * 1e3:.3f}"
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    return headers


_SAMPLE = re.compile(r"^vllm:(\w+)(\{[^}]*\})? (\S+)", re.MULTILINE)
_PREFILL = re.compile(r'^headway_prefill_seconds\{[^}]*tokens="(\d+)"[^}]*\} ([\d.e+-]+)$', re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


class ServerLoad(msgspec.Struct, frozen=True):
    """One scrape. Sums over the server's engines, where it has several."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    """Share of the KV pool in use, the largest of all engines."""
    kv_tokens: int = 0
    """Tokens that the KV pool holds; 0: not stated."""
    block_tokens: int = 0
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    prefill_s: tuple[tuple[int, float], ...] = ()
    """Tokens of prompts and their seconds alone, as Headway's scheduler in the server has learned; mean of its engines.
    """


def parse_load(page: str) -> ServerLoad:
    """Read a metrics page; what is not there is 0."""
    sums: dict[str, float] = {}
    usage, kv_tokens, block = 0.0, 0, 0
    for name, labels, text in _SAMPLE.findall(page):
        try:
            value = float(text)
        except ValueError:
            continue
        if name == "kv_cache_usage_perc":
            usage = max(usage, value)
        elif name == "cache_config_info":
            config = dict(_LABEL.findall(labels))
            blocks, size = config.get("num_gpu_blocks", ""), config.get("block_size", "")
            if blocks.isdecimal() and size.isdecimal():
                kv_tokens, block = kv_tokens + int(blocks) * int(size), int(size)
        else:
            sums[name] = sums.get(name, 0.0) + value
    prefills: dict[int, list[float]] = {}
    for tokens, seconds in _PREFILL.findall(page):
        prefills.setdefault(int(tokens), []).append(float(seconds))
    return ServerLoad(
        running=int(sums.get("num_requests_running", 0)),
        waiting=int(sums.get("num_requests_waiting", 0)),
        kv_usage=usage,
        kv_tokens=kv_tokens,
        block_tokens=block,
        prompt_tokens_total=int(sums.get("prompt_tokens_total", 0)),
        generation_tokens_total=int(sums.get("generation_tokens_total", 0)),
        prefill_s=tuple((tokens, sum(each) / len(each)) for tokens, each in sorted(prefills.items())),
    )


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
        except (msgspec.DecodeError, RecursionError, KeyError, IndexError, TypeError) as error:
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
        except (msgspec.DecodeError, RecursionError, AttributeError):
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
    except (msgspec.DecodeError, RecursionError, AttributeError, KeyError, TypeError):
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
    except (msgspec.DecodeError, RecursionError, AttributeError, KeyError, TypeError) as error:
        raise ServerGoneError(f"the instance sent what is no chunk of an answer ({error!r})") from None


# Prefill on one vLLM server and decode on another: the `kv_transfer_params` protocol of vLLM's NixlConnector.
#
# The prefill leg asks for one token and is answered with parameters; the decode leg carries them unchanged, and both
# have the same `X-Request-Id`. The decode server reads the KV, after which the prefill server frees it. Roles belong to
# the request: any server with the connector can have either.
#
# When the client leaves during the prefill leg, that connection is closed, which ends the prefill. Once the prefill
# server has answered it keeps the KV until it is read or its lease ends, so the decode leg is carried on to its first
# token and only then closed. An answer that crosses the closing of its connection stays: that KV is freed by the lease.

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


log = logging.getLogger("headway.cluster")

_LARGE_PROMPT = 1 << 16
"""Bytes of a prompt that is written as JSON in a thread."""


class AnswerStream:
    """One attempt's connection. What comes after `close`, or when its attempt has another stream, is ignored."""

    __slots__ = ("_at", "first", "prefill", "sent_s", "target", "task")

    def __init__(self, target: HttpInstance, sent_s: float, prefill: HttpInstance | None, output: int) -> None:
        """output: tokens of the answer that were sent as part of the prompt."""
        self.target, self.sent_s = target, sent_s
        self.prefill = prefill
        """Instance that computes the prompt for `target`, until it has; None: `target` itself."""
        self.first = False
        """Whether the prompt is computed."""
        self.task: asyncio.Task[None] | None = None
        self._at = output

    def take(self, asked: ClusterRequest, tokens: Sequence[int]) -> tuple[int, ...]:
        """Take in tokens of the answer; return those that the client does not have yet.

        Raises InvariantError when an attempt that begins anew repeats other tokens than the client has."""
        known = asked.told[self._at : self._at + len(tokens)]
        if list(tokens[: len(known)]) != known:
            raise InvariantError("the answer differs from the one before its instance was lost")
        self._at += len(tokens)
        most = asked.submit.params.max_tokens
        if self._at > most:
            raise InvariantError(f"an instance has sent more than the {most} tokens that were wanted")
        return tuple(tokens[len(known) :])

    def close(self) -> None:
        """Close the connection, which ends the request on the instance."""
        if self.task is not None:
            self.task.cancel()


async def read_answer(
    asked: ClusterRequest,
    stream: AnswerStream,
    output: Sequence[int],
    receive: Callable[[StreamedTokens], None],
    broken: Callable[[HeadwayError], None],
) -> None:
    """Send a request to an instance and read its answer to the end. output: tokens of the answer that become part of
    the prompt. receive: called with each part. broken: called with the error that ended it, those raised by `receive`
    included."""
    target, prefill = stream.target, stream.prefill
    headers = request_headers(asked.submit, asked.sends, target.api_key)
    try:
        arguments = (asked.submit, asked.prompt, target.model.id, output)
        if memoryview(asked.prompt).nbytes > _LARGE_PROMPT:
            body = await asyncio.to_thread(completion_body, *arguments)
        else:
            body = completion_body(*arguments)
        if prefill is None:
            answer = target.server.complete(body, headers)
        else:
            answer = KvHandOver(prefill.server, target.server, body, headers).pieces()
        async with aclosing(answer) as pieces:  # type: ignore[type-var]
            async for piece in pieces:
                receive(piece)
    except HeadwayError as error:
        broken(error)
    except Exception:
        # Nothing awaits this task: without this the client would wait for ever.
        log.exception("the cluster has failed at %s", asked.name)
        broken(InvariantError("the cluster has failed at this request; see its log"))


def without_end_token(
    submit: SubmitRequest, end_tokens: frozenset[int], piece: StreamedTokens
) -> tuple[tuple[int, ...], int | None]:
    """Return an event's tokens without the end token that vLLM reports as the last, and that token. end_tokens: of the
    model."""
    params = submit.params
    ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else end_tokens)
    if piece.finish == "stop" and piece.tokens and piece.tokens[-1] in ends:
        return piece.tokens[:-1], piece.tokens[-1]
    return piece.tokens, None
