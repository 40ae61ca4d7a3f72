"""Structured logs of every process: one line an event, key=value or JSON, to stderr."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any


def setup(level: str, form: str, **always: Any) -> None:
    """Send everything under the `headway` and `uvicorn` loggers to stderr. Called once by a process's entry point.

    `always`: fields of every line, which identify the process."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(always) if form == "json" else TextFormatter(always))
    for name in ("headway", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(level.upper())


class _LineFormatter(logging.Formatter):
    def __init__(self, always: dict[str, Any] | None = None) -> None:
        super().__init__()
        self._always = always or {}

    def _fields(self, record: logging.LogRecord) -> dict[str, Any]:
        fields = getattr(record, "fields", None)
        return self._always | fields if isinstance(fields, dict) else self._always


class TextFormatter(_LineFormatter):
    """Time, level, message, and fields as key=value."""

    def format(self, record: logging.LogRecord) -> str:
        pairs = " ".join(f"{key}={_plain(value)}" for key, value in self._fields(record).items())
        line = f"{_stamp(record)} {record.levelname.lower()} {record.getMessage()}"
        return "\n".join(part for part in (f"{line} {pairs}".rstrip(), self._trace(record)) if part)

    def _trace(self, record: logging.LogRecord) -> str:
        return self.formatException(record.exc_info) if record.exc_info else ""


class JsonFormatter(_LineFormatter):
    """One object a line."""

    def format(self, record: logging.LogRecord) -> str:
        line = {"time": _stamp(record), "level": record.levelname.lower(), "logger": record.name}
        line |= {"message": record.getMessage(), **self._fields(record)}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _stamp(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


def _plain(value: Any) -> str:
    text = str(value)
    safe = text.isprintable() and text and not any(char in text for char in ' "=')
    return text if safe else json.dumps(text)
