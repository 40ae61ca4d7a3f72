"""A request that the cluster has accepted: the output that was sent to its client, and the attempts at it."""

from __future__ import annotations

import msgspec

from headway.core.request import Request
from headway.runtime.cluster.client_answer import AnswerQueue
from headway.runtime.engine.protocol import OutputDelta, SubmitRequest


class ClusterRequest:
    """One request. After a loss, another attempt continues after the output that was sent to the client."""

    __slots__ = (
        "answer",
        "answered",
        "attempt",
        "cached_tokens",
        "first_s",
        "losses",
        "name",
        "over",
        "prefix_failed",
        "prompt",
        "runs_lost",
        "saved_s",
        "submit",
        "told",
    )

    def __init__(self, submit: SubmitRequest, prompt: bytes | memoryview) -> None:
        self.submit, self.prompt = submit, prompt
        self.told: list[int] = list(submit.output)
        """Output tokens that the client has, those of before this cluster's start included."""
        self.answered = False
        """Whether any output was sent since it was accepted."""
        self.attempt = 0
        """Number of attempts so far."""
        self.runs_lost = 0
        """How often a task of it was lost, with or without an instance."""
        self.losses = 0
        """Number of instances that were lost with it on them."""
        self.name = ""
        """Name of the attempt under way; empty: it waits for instances."""
        self.over = False
        """Whether its last output, or its error, was sent."""
        self.first_s: float | None = None
        """Time at which its first task began; None again once a delta has carried it."""
        self.cached_tokens, self.saved_s = 0, 0.0
        """Tokens with which spans of the attempt under way began, and the seconds that these would have taken; 0 again
        once a delta has carried them."""
        self.prefix_failed = False
        """Whether an attempt was lost whose spans began behind a cached prefix."""
        self.answer = AnswerQueue()

    @property
    def left(self) -> int:
        """Number of output tokens that may still come."""
        return self.submit.params.max_tokens - len(self.told)

    def try_again(self) -> Request:
        """Return another attempt as a request of its own, whose prompt is the prompt and all output so far."""
        self.attempt += 1
        self.cached_tokens, self.saved_s = 0, 0.0
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
        """Send an instance's output to the client, under the client's request id."""
        if self.over:
            return
        first_s = delta.first_scheduled_s if self.first_s is None else self.first_s
        cached, saved_s = delta.cached_tokens or self.cached_tokens, delta.saved_s or self.saved_s
        self.first_s, self.cached_tokens, self.saved_s = None, 0, 0.0
        self.told.extend(delta.tokens)
        self.answered = True
        self.over = delta.finish is not None
        sent = {"id": self.submit.id, "first_scheduled_s": first_s, "cached_tokens": cached, "saved_s": saved_s}
        self.answer.put(msgspec.structs.replace(delta, **sent))

    def fail(self, error: Exception) -> None:
        """End the request with an error. Harmless when it has ended."""
        if not self.over:
            self.over = True
            self.answer.put(error)
