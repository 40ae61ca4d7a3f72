"""The log line of a request (`core.structured_log`). Prompts and answers are never logged, only their sizes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from headway.serving.generation_record import GenerationRecord

log = logging.getLogger("headway.server")


def log_request(
    request_id: str, method: str, path: str, status: int, duration_s: float, records: Sequence[GenerationRecord],
    client: str | None, refused: str | None = None,
) -> None:  # fmt: skip
    """Log one line for a finished HTTP request; at debug level for probes of health and metrics."""
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
    quiet = path in ("/health", "/ready", "/metrics", "/v1/live")
    log.log(logging.DEBUG if quiet else logging.INFO, "request", extra={"fields": fields})
