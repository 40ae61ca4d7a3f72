"""Connections to instances: one for each attempt at a request, read in a task of its own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing
from typing import TYPE_CHECKING

from headway.control.request_lifecycle import AttemptContinuation
from headway.core.errors import HeadwayError, InvariantError
from headway.runtime.http_cluster.completion_body import completion_body, request_headers
from headway.runtime.http_cluster.kv_hand_over import KvHandOver

if TYPE_CHECKING:
    from headway.runtime.engine.protocol import SubmitRequest
    from headway.runtime.http_cluster.http_instance import HttpInstance
    from headway.runtime.http_cluster.http_request import HttpRequest
    from headway.runtime.http_cluster.http_server import StreamedTokens

log = logging.getLogger("headway.cluster")

_LARGE_PROMPT = 1 << 16
"""Bytes of a prompt that is written as JSON in a thread."""


class AnswerStream:
    """One attempt's connection. What comes after `close`, or when its request has another stream, is ignored."""

    __slots__ = ("first", "instance", "prefill", "sent_s", "task")

    def __init__(self, instance: int, sent_s: float, prefill: HttpInstance | None = None) -> None:
        self.instance, self.sent_s = instance, sent_s
        self.prefill = prefill
        """Instance that computes the prompt for `instance`, until it has; None: `instance` itself."""
        self.first = False
        """Whether the prompt is computed."""
        self.task: asyncio.Task[None] | None = None

    def close(self) -> None:
        """Close the connection, which ends the request on the instance."""
        if self.task is not None:
            self.task.cancel()


async def read_answer(
    request: HttpRequest,
    target: HttpInstance,
    prefill: HttpInstance | None,
    continuation: AttemptContinuation,
    api_key: str | None,
    receive: Callable[[StreamedTokens], None],
    broken: Callable[[HeadwayError], None],
) -> None:
    """Send a request to an instance and read its answer to the end. prefill: computes the prompt for it, if any.
    api_key: sent to both. receive: called with each part. broken: called with the error that ended it, those raised by
    `receive` included."""
    headers = request_headers(request.submit, request.life.attempts, api_key)
    try:
        arguments = (request.submit, request.prompt, target.model.id, continuation, request.submit.priority)
        if memoryview(request.prompt).nbytes > _LARGE_PROMPT:
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
        log.exception("the cluster has failed at %s", request.name)
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
