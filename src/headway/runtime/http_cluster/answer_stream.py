"""One attempt's connection to an instance, read in a task of its own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing
from typing import TYPE_CHECKING

from headway.control.request_lifecycle import AttemptContinuation
from headway.core.errors import HeadwayError, InvariantError
from headway.runtime.http_cluster.completion_body import completion_body, request_headers

if TYPE_CHECKING:
    from headway.runtime.engine.protocol import SubmitRequest
    from headway.runtime.http_cluster.http_instance import HttpInstance
    from headway.runtime.http_cluster.http_request import HttpRequest
    from headway.runtime.http_cluster.http_server import StreamedTokens

log = logging.getLogger("headway.cluster")

_LARGE_PROMPT = 1 << 16
"""Bytes of a prompt that is written as JSON in a thread."""


class AnswerStream:
    """See the module. Its request's `stream` is another one, or None, once what still comes is to be ignored."""

    __slots__ = ("_api_key", "_continuation", "_request", "_target", "_task", "first", "instance", "sent_s")

    def __init__(
        self,
        request: HttpRequest,
        target: HttpInstance,
        continuation: AttemptContinuation,
        sent_s: float,
        api_key: str | None,
    ) -> None:
        """sent_s: now. api_key: sent to the instance."""
        self._request, self._target, self._continuation, self._api_key = request, target, continuation, api_key
        self.instance, self.sent_s = target.number, sent_s
        self.first = False
        """Whether the prompt is computed."""
        self._task: asyncio.Task[None] | None = None

    def open(
        self,
        receive: Callable[[HttpRequest, AnswerStream, StreamedTokens], None],
        breaks: Callable[[HttpRequest, AnswerStream, HeadwayError], None],
    ) -> None:
        """Send the request. receive: called with each part of the answer. breaks: called with the error that ended it,
        those raised by `receive` included."""
        self._task = asyncio.get_running_loop().create_task(self._run(receive, breaks))

    def close(self) -> None:
        """Close the connection, which ends the request on the instance."""
        if self._task is not None:
            self._task.cancel()

    async def _run(
        self,
        receive: Callable[[HttpRequest, AnswerStream, StreamedTokens], None],
        breaks: Callable[[HttpRequest, AnswerStream, HeadwayError], None],
    ) -> None:
        request = self._request
        headers = request_headers(request.submit, request.life.attempts, self._api_key)
        try:
            arguments = (request.submit, request.prompt, self._target.model.id, self._continuation)
            if memoryview(request.prompt).nbytes > _LARGE_PROMPT:
                body = await asyncio.to_thread(completion_body, *arguments)
            else:
                body = completion_body(*arguments)
            async with aclosing(self._target.server.complete(body, headers)) as pieces:  # type: ignore[type-var]
                async for piece in pieces:
                    receive(request, self, piece)
        except HeadwayError as error:
            breaks(request, self, error)
        except Exception:
            # A task's error is seen by none: without this the client would wait for ever.
            log.exception("the cluster has failed at %s", request.name)
            breaks(request, self, InvariantError("the cluster has failed at this request; see its log"))


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
