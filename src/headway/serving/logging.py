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
        first = [record.ttft_s for record in records if record.ttft_s is not None]
        fields["prompt_tokens"] = sum(record.prompt_tokens for record in records)
        fields["output_tokens"] = sum(record.output_tokens for record in records)
        # Of a batch of prompts, the earliest first token.
        fields["ttft_s"] = round(min(first), 6) if first else None
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
