"""Times and counts of one prompt's generation: the source of its metrics and of its log line. Prompts and answers are
never logged, only their sizes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from headway.core.request import Slo
from headway.runtime.engine.protocol import FinishReason, OutputDelta


@dataclass(slots=True)
class GenerationRecord:
    """One prompt's times and counts. Times are `time.monotonic()` seconds, as stamped by the engine."""

    received_s: float
    prompt_tokens: int
    on_first: Callable[[GenerationRecord, float, int], None]
    """Called at the first delta that has tokens, with the seconds since `received_s` and the tokens."""
    on_gap: Callable[[GenerationRecord, float, int], None]
    """Called with the seconds since the previous delta, and the tokens, for each later delta that has tokens."""
    on_finish: Callable[[GenerationRecord], None]
    """Called once at the end, unless `on_reject` was."""
    on_reject: Callable[[int], None]
    """Called with the HTTP status when the engine refused the request."""
    slo: Slo = field(default_factory=Slo)
    """What the client asked for, within the operator's limits."""
    request_class: str = "short"
    """The name under which metrics count the request."""
    max_tokens: int = 0
    """Most output tokens that the request may have; 0: not known."""
    output_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache."""
    saved_s: float = 0.0
    """Seconds that computing them would have taken, by the latency model."""
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    finished_s: float | None = None
    worst_gap_s: float = 0.0
    """Longest time between two deltas with tokens."""
    reason: FinishReason | None = field(default=None)

    def observe(self, delta: OutputDelta) -> None:
        """Add a delta; called for each, in order."""
        if self.first_scheduled_s is None:
            self.first_scheduled_s = delta.first_scheduled_s
            self.cached_tokens, self.saved_s = delta.cached_tokens, delta.saved_s
        if not delta.tokens:
            return
        # 0.0: an engine that stamps no time, such as a test double.
        now = delta.emitted_s or time.monotonic()
        self.output_tokens += len(delta.tokens)
        if self.first_token_s is None:
            self.first_token_s = now
            self.on_first(self, max(0.0, now - self.received_s), len(delta.tokens))
        elif self.last_token_s is not None:
            gap = max(0.0, now - self.last_token_s)
            self.worst_gap_s = max(self.worst_gap_s, gap)
            self.on_gap(self, gap, len(delta.tokens))
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

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds per output token after the first; None with fewer than two tokens."""
        if self.first_token_s is None or self.last_token_s is None or self.output_tokens < 2:
            return None
        return max(0.0, self.last_token_s - self.first_token_s) / (self.output_tokens - 1)

    def objectives(self) -> dict[str, bool]:
        """Return whether each objective that the client asked for was met, by name (`ttft`, `tpot`), once it is ended.

        As in `sim.metrics`: an objective that cannot be measured counts as missed, except that a request
        of one token has no TPOT to miss. A client that left is not held against the server: what had not been missed
        by then is left out.
        """
        met: dict[str, bool] = {}
        ended, left = self.finished_s or self.received_s, self.reason == "abort"
        ttft, tpot = self.ttft_s, self.tpot_s
        if self.slo.ttft_s is not None:
            if ttft is not None or not left:
                met["ttft"] = ttft is not None and ttft <= self.slo.ttft_s
            elif ended - self.received_s > self.slo.ttft_s:
                met["ttft"] = False
        if self.slo.tbt_s is not None and (ttft is not None or not left):
            met["tpot"] = ttft is not None and (tpot or 0.0) <= self.slo.tbt_s
        # A failed request has no answer to be in time.
        return {name: each and self.reason not in ("error", "timeout") for name, each in met.items()}


# The log line of a request (`core.logs`). Prompts and answers are never logged, only their sizes.

log = logging.getLogger("headway.server")


def log_request(
    request_id: str, method: str, path: str, status: int, duration_s: float, records: Sequence[GenerationRecord],
    client: str | None, refused: str | None = None,
) -> None:  # fmt: skip
    """Log one line for a finished HTTP request; at debug level for probes and for the files of pages."""
    fields: dict[str, Any] = {"request_id": request_id, "method": method, "path": path, "status": status}
    fields["duration_s"] = round(duration_s, 6)
    if client is not None:
        fields["client"] = client
    if refused is not None:
        # Cut: a message may quote a field of the body, never its text at length.
        fields["reason"] = refused[:200]
    if records:
        fields["prompt_tokens"] = sum(record.prompt_tokens for record in records)
        fields["output_tokens"] = sum(record.output_tokens for record in records)
        earliest = min((r for r in records if r.ttft_s is not None), key=lambda r: r.first_token_s or 0.0, default=None)
        # Of a batch of prompts, the earliest first token.
        fields["ttft_s"] = None if earliest is None or earliest.ttft_s is None else round(earliest.ttft_s, 6)
        if earliest is not None and earliest.first_scheduled_s is not None and earliest.first_token_s is not None:
            # Of its time to first token: waiting, and computing; and what the cached tokens saved of the latter.
            fields["queue_s"] = round(max(0.0, earliest.first_scheduled_s - earliest.received_s), 6)
            fields["computed_s"] = round(max(0.0, earliest.first_token_s - earliest.first_scheduled_s), 6)
            if earliest.cached_tokens:
                fields["cached_tokens"] = earliest.cached_tokens
                fields["cached_saved_s"] = round(earliest.saved_s, 6)
        fields["class"] = records[0].request_class
        asked = [objectives for record in records if (objectives := record.objectives())]
        if asked:
            fields["slo"] = "met" if all(all(each.values()) for each in asked) else "missed"
        gaps = [record.worst_gap_s for record in records if record.output_tokens > 1]
        if gaps:
            fields["worst_gap_s"] = round(max(gaps), 6)
        fields["finish_reason"] = ",".join(str(record.reason) for record in records)
    quiet = path in ("/health", "/ready", "/metrics", "/v1/live", "/favicon.ico") or path.startswith("/ui/")
    log.log(logging.DEBUG if quiet else logging.INFO, "request", extra={"fields": fields})
