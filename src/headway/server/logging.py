"""Structured logs: one line an event, key=value or JSON. Prompts and answers are never logged, only their sizes."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from headway.server.record import GenerationRecord

log = logging.getLogger("headway.server")


def setup(level: str, form: str) -> None:
    """Send everything under the `headway` and `uvicorn` loggers to stderr. Called once by whoever owns the process."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter() if form == "json" else _TextFormatter())
    for name in ("headway", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(level.upper())


def log_request(
    request_id: str, method: str, path: str, status: int, duration_s: float, records: Sequence[GenerationRecord],
    client: str | None,
) -> None:  # fmt: skip
    """One line for a finished HTTP request. Probes of health and metrics are worth a debug line only."""
    fields: dict[str, Any] = {"request_id": request_id, "method": method, "path": path, "status": status}
    fields["duration_s"] = round(duration_s, 6)
    if client is not None:
        fields["client"] = client
    if records:
        first = [record.ttft_s for record in records if record.ttft_s is not None]
        fields["prompt_tokens"] = sum(record.prompt_tokens for record in records)
        fields["output_tokens"] = sum(record.output_tokens for record in records)
        fields["ttft_s"] = round(min(first), 6) if first else None
        fields["finish_reason"] = ",".join(str(record.reason) for record in records)
    quiet = path in ("/health", "/ready", "/metrics")
    log.log(logging.DEBUG if quiet else logging.INFO, "request", extra={"fields": fields})


class _TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        pairs = " ".join(f"{key}={_plain(value)}" for key, value in _fields(record).items())
        line = f"{_stamp(record)} {record.levelname.lower()} {record.getMessage()}"
        return "\n".join(part for part in (f"{line} {pairs}".rstrip(), self._trace(record)) if part)

    def _trace(self, record: logging.LogRecord) -> str:
        return self.formatException(record.exc_info) if record.exc_info else ""


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {"time": _stamp(record), "level": record.levelname.lower(), "logger": record.name}
        line |= {"message": record.getMessage(), **_fields(record)}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields = getattr(record, "fields", None)
    return fields if isinstance(fields, dict) else {}


def _stamp(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


def _plain(value: Any) -> str:
    text = str(value)
    safe = text.isprintable() and text and not any(char in text for char in ' "=')
    return text if safe else json.dumps(text)
