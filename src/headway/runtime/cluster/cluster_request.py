"""A request that the cluster has accepted: the output that its client has, and the attempts at it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec

from headway.core.request import Request
from headway.runtime.engine.protocol import OutputDelta, SubmitRequest
from headway.runtime.engine.rejections import rejection_error


class ClusterRequest:
    """One request. After a loss, another attempt continues behind the output that the client has.

    Whatever is lost of it, another attempt goes on behind what the client was told.
    """

    __slots__ = (
        "_news",
        "answered",
        "attempt",
        "first_s",
        "losses",
        "name",
        "over",
        "prompt",
        "runs_lost",
        "submit",
        "told",
    )

    def __init__(self, submit: SubmitRequest, prompt: bytes | memoryview) -> None:
        self.submit, self.prompt = submit, prompt
        self.told: list[int] = list(submit.output)
        self.answered = False
        """Whether there was any word of it since it was accepted."""
        self.attempt = 0
        self.runs_lost = 0
        self.losses = 0
        """Instances that were lost with it on them."""
        self.name = ""
        """Of the attempt under way; empty: it waits for instances."""
        self.over = False
        self.first_s: float | None = None
        """When work on it began, until that was told."""
        self._news: asyncio.Queue[OutputDelta | Exception] = asyncio.Queue()

    @property
    def left(self) -> int:
        """Output tokens that may still come."""
        return self.submit.params.max_tokens - len(self.told)

    def try_again(self) -> Request:
        """Another attempt, as a request of its own: its prompt is all that is known."""
        self.attempt += 1
        submit = self.submit
        self.name = f"{submit.id}#{self.attempt}"
        return Request(
            id=self.name,
            arrival_s=submit.received_s,
            prompt_tokens=submit.prompt_tokens + len(self.told),
            max_output_tokens=self.left,
            slo=submit.slo,
            priority=submit.priority,
        )

    def tell(self, delta: OutputDelta) -> None:
        """An instance has something for the client."""
        if self.over:
            return
        first_s = delta.first_scheduled_s if self.first_s is None else self.first_s
        self.first_s = None
        self.told.extend(delta.tokens)
        self.answered = True
        self.over = delta.finish is not None
        self._news.put_nowait(msgspec.structs.replace(delta, id=self.submit.id, first_scheduled_s=first_s))

    def fail(self, error: Exception) -> None:
        """It cannot be answered, or not further."""
        if not self.over:
            self.over = True
            self._news.put_nowait(error)

    async def answer(self) -> AsyncIterator[OutputDelta]:
        """What the client gets, to the last. Raises what the request failed with."""
        while True:
            delta = await self._news.get()
            if isinstance(delta, Exception):
                raise delta
            if (error := rejection_error(delta)) is not None:
                raise error
            yield delta
            if delta.finish is not None:
                return
