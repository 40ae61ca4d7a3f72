"""Times and counts of one prompt's generation: the source of both its metrics and its log line."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from headway.runtime.engine.protocol import FinishReason, OutputDelta


@dataclass(slots=True)
class GenerationRecord:
    """One prompt's times and counts. Times are `time.monotonic()` seconds, as stamped by the engine."""

    received_s: float
    prompt_tokens: int
    on_first: Callable[[float], None]
    """Called at the first token, with the seconds since `received_s`."""
    on_gap: Callable[[float, int], None]
    """Called with (seconds since the previous delta, tokens) for each later delta that has tokens."""
    on_finish: Callable[[GenerationRecord], None]
    """Called once at the end, unless `on_reject` was."""
    on_reject: Callable[[int], None]
    """Called with the HTTP status when the engine refused the request."""
    output_tokens: int = 0
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    finished_s: float | None = None
    reason: FinishReason | None = field(default=None)

    def observe(self, delta: OutputDelta) -> None:
        """Add a delta; called for each, in order."""
        if self.first_scheduled_s is None:
            self.first_scheduled_s = delta.first_scheduled_s
        if not delta.tokens:
            return
        # 0.0: an engine that stamps no time, such as a test double.
        now = delta.emitted_s or time.monotonic()
        self.output_tokens += len(delta.tokens)
        if self.first_token_s is None:
            self.first_token_s = now
            self.on_first(max(0.0, now - self.received_s))
        elif self.last_token_s is not None:
            self.on_gap(max(0.0, now - self.last_token_s), len(delta.tokens))
        self.last_token_s = now

    def resume(self, delta: OutputDelta) -> None:
        """Add a delta from before a restart: its tokens count, its times do not."""
        self.output_tokens += len(delta.tokens)

    def finish(self, reason: FinishReason) -> None:
        """Set the end and its reason; only the first call has an effect."""
        if self.reason is None:
            self.reason = reason
            self.finished_s = time.monotonic()
            self.on_finish(self)

    def reject(self, status: int) -> None:
        """End the record as refused by the engine: counted under rejections and not under failures."""
        if self.reason is None:
            self.reason = "error"
            self.on_reject(status)

    @property
    def ttft_s(self) -> float | None:
        """Seconds from reception to the first token."""
        return None if self.first_token_s is None else max(0.0, self.first_token_s - self.received_s)
