"""What happened to one request, as times and counts: the source of both its metrics and its log line."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from headway.runtime.engine.protocol import FinishReason, OutputDelta


@dataclass(slots=True)
class GenerationRecord:
    """One prompt's way through the engine. Times are `time.monotonic()` seconds, as the engine stamps them.

    `on_gap` is called with (seconds, tokens) each time tokens arrive after the first, `on_first` with the seconds since
    the request was received, `on_finish` once, with the record; or instead `on_reject`, with the status.
    """

    received_s: float
    prompt_tokens: int
    on_first: Callable[[float], None]
    on_gap: Callable[[float, int], None]
    on_finish: Callable[[GenerationRecord], None]
    on_reject: Callable[[int], None]
    output_tokens: int = 0
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    finished_s: float | None = None
    reason: FinishReason | None = field(default=None)

    def observe(self, delta: OutputDelta) -> None:
        """Called with every delta, in order."""
        if self.first_scheduled_s is None:
            self.first_scheduled_s = delta.first_scheduled_s
        if not delta.tokens:
            return
        now = delta.emitted_s or time.monotonic()
        self.output_tokens += len(delta.tokens)
        if self.first_token_s is None:
            self.first_token_s = now
            self.on_first(max(0.0, now - self.received_s))
        elif self.last_token_s is not None:
            self.on_gap(max(0.0, now - self.last_token_s), len(delta.tokens))
        self.last_token_s = now

    def resume(self, delta: OutputDelta) -> None:
        """Count output from before a restart; no time is taken. Called with every delta, in order."""
        self.output_tokens += len(delta.tokens)

    def finish(self, reason: FinishReason) -> None:
        """The end; only the first call counts."""
        if self.reason is None:
            self.reason = reason
            self.finished_s = time.monotonic()
            self.on_finish(self)

    def reject(self, status: int) -> None:
        """The engine took nothing on: an end that counts as a refusal and not as a failure."""
        if self.reason is None:
            self.reason = "error"
            self.on_reject(status)

    @property
    def ttft_s(self) -> float | None:
        """Seconds from reception to the first token."""
        return None if self.first_token_s is None else max(0.0, self.first_token_s - self.received_s)
