"""A request of a cluster of HTTP instances: what its client is sent, and the stream that computes it now."""

from __future__ import annotations

import time

from headway.control.controlled_request import ControlledRequest
from headway.control.queue_entries import SpanEntry
from headway.control.request_lifecycle import RequestLifecycle
from headway.core.request import Request
from headway.kv.text_keys import TextKeys
from headway.runtime.cluster.cached_keys import ASSUMED_BLOCK, text_of
from headway.runtime.cluster.client_answer import AnswerQueue
from headway.runtime.engine.protocol import FinishReason, OutputDelta, SubmitRequest
from headway.runtime.http_cluster.answer_stream import AnswerStream
from headway.runtime.http_cluster.completion_body import begins_anew, sent_salt


class HttpRequest:
    """One request from its acceptance to its end."""

    __slots__ = ("_attempt", "_before", "_first_s", "answer", "cached", "controlled", "entry", "life", "prompt",
                 "stranded", "stream", "submit", "text", "texts")  # fmt: skip

    def __init__(self, submit: SubmitRequest, prompt: bytes | memoryview) -> None:
        self.submit, self.prompt = submit, prompt
        self.text = text_of(submit, prompt, submit.output, ASSUMED_BLOCK)
        """Keys of prompt and answer."""
        self.texts: dict[int, TextKeys] = {}
        """See `text_in`: of the attempt's prompt."""
        self.cached: tuple[int, ...] = ()
        """Tokens that each instance has cached, or is assumed to have, of the attempt's prompt."""
        params = submit.params
        self.life = RequestLifecycle(
            params.max_tokens, params.min_tokens, submit.output, restarts=begins_anew(submit) and params.max_tokens > 1
        )
        self.controlled: ControlledRequest | None = None
        """The controller's state of the attempt under way."""
        self.entry: SpanEntry | None = None
        """The span that computes the prompt, if the policy has committed one."""
        self.stream: AnswerStream | None = None
        self.stranded = 0
        """How often no instance was chosen for it though there was one."""
        self._attempt = 0
        self._before = 0
        self._first_s: float | None = None
        self.answer = AnswerQueue()

    def attempt(self) -> Request:
        """Return another attempt as the controller's request, whose prompt is the prompt and all output so far."""
        self._attempt += 1
        self.controlled, self.entry, self.stream = None, None, None
        self._before = len(self.life.output)
        self.texts.clear()
        submit = self.submit
        return Request(
            id=f"{submit.id}#{self._attempt}",
            arrival_s=submit.received_s,
            prompt_tokens=submit.prompt_tokens + self._before,
            max_output_tokens=max(1, submit.params.max_tokens - self._before),
            slo=submit.slo,
            priority=submit.priority,
        )

    def text_in(self, block_tokens: int) -> TextKeys:
        """Return the keys of the attempt's prompt in blocks of a server's own size, with the salt that it is sent."""
        if block_tokens not in self.texts:
            submit, told = self.submit, self.life.output[: self._before]
            self.texts[block_tokens] = text_of(submit, self.prompt, told, block_tokens, sent_salt(submit))
        return self.texts[block_tokens]

    @property
    def name(self) -> str:
        """Name of the attempt."""
        return f"{self.submit.id}#{self._attempt}"

    @property
    def attempt_tokens(self) -> int:
        """Output tokens since the attempt began."""
        return len(self.life.output) - self._before

    @property
    def complete(self) -> bool:
        """Whether it has as many tokens as it may have: only its end is missing."""
        return len(self.life.output) >= self.submit.params.max_tokens

    def begun(self, now: float) -> None:
        """Record that an instance has accepted it."""
        self._first_s = self._first_s or now

    def send(self, tokens: tuple[int, ...], finish: FinishReason | None = None, stop_token: int | None = None) -> None:
        """Send output to the client."""
        if self.text.keys:
            for token in tokens:
                self.text.append(token)
        first_s, self._first_s = (self._first_s, None) if tokens else (None, self._first_s)
        now = time.monotonic()
        self.answer.put(
            OutputDelta(
                id=self.submit.id, tokens=tokens, finish=finish, stop_token=stop_token, emitted_s=now,
                first_scheduled_s=first_s,
            )
        )  # fmt: skip

    def fail(self, error: Exception) -> None:
        """End the request with an error. No effect when it has ended."""
        if not self.life.over:
            self.life.fail()
            self.answer.put(error)
