"""Log files and log lines: the event log that can be replayed, and the structured log on stderr."""

from __future__ import annotations

import json
import logging
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import msgspec

from headway.core.batch import Batch, RequestProgress
from headway.core.errors import ConfigError
from headway.core.files import ATTEMPTS, lock, open_output
from headway.core.request import Request

EventSink = Callable[[str, dict[str, object]], None]
"""Receives one event: its kind and its fields."""

log = logging.getLogger("headway.engine")

_BUFFER_BYTES = 1 << 20
_MOST_KEPT = 8 << 20
"""Bytes that wait for a disk that fails: some ten thousand iterations."""
_FREQUENT = frozenset(("batch", "interrupt", "schedule", "scheduled"))


class LineWriter:
    """Writer of a log's lines that outlives its disk: what reports goes on, whatever becomes of the report.

    Lines wait in memory while the disk takes none. Those beyond `_MOST_KEPT` bytes are counted, and a line
    `{"event": "missing", "lines": N}` stands in their place.
    """

    def __init__(self, path: str) -> None:
        self.problem: str | None = None
        """Why nothing can be written at present; None: all is well."""
        self._path = path
        self._file = open_event_log(path)
        self._pending = bytearray()
        self._missing = 0

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self.flush()
            self._file.close()

    def add(self, line: bytes) -> None:
        """Take a line, without its end."""
        if self.problem is not None and (self._missing or len(self._pending) > _MOST_KEPT):
            self._missing += 1
            return
        self._pending += line + b"\n"
        if len(self._pending) > _BUFFER_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what waits. Where the disk fails, `problem` says so until it does not."""
        try:
            self._write()
            if self._missing:
                self._pending += b'{"event":"missing","lines":%d}\n' % self._missing
                self._missing = 0
                self._write()
        except OSError as error:
            if self.problem is None:
                log.error("the log %s cannot be written: %s; what it would say is kept for a while", self._path, error)
            self.problem = f"the log {self._path} cannot be written: {error.strerror}"
            return
        if self.problem is not None:
            log.warning("the log %s can be written again", self._path)
            self.problem = None

    def _write(self) -> None:
        while self._pending:
            # A write may take less than it was given.
            done = os.write(self._file.fileno(), self._pending)
            del self._pending[:done]


class LogSink:
    """`EventSink` of a JSON-lines log of a scheduler's input and decisions, for replay.

    Raises ConfigError as `open_event_log` does."""

    def __init__(self, path: str) -> None:
        self.lines = LineWriter(path)
        self._encoder = msgspec.json.Encoder()

    def __call__(self, kind: str, fields: dict[str, object]) -> None:
        """Write an event."""
        self.lines.add(self._encoder.encode({"event": kind, **fields}))
        # Batches are frequent: they wait until a rarer event, or one that ends a request.
        if kind not in _FREQUENT or fields.get("ended"):
            self.lines.flush()


def numbered_lines(lines: Iterable[bytes | str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the lines of a log with their numbers. A killed process may leave its last one torn: that is left out.

    Nothing is yielded of a file that is no log, by its first line. Raises ConfigError, with the number, for any other
    line that cannot be read."""
    torn = 0
    for number, line in enumerate(lines, start=1):
        if torn == 1:
            return
        if torn:
            raise ConfigError(f"line {torn} of the log cannot be read, and others follow: it is damaged")
        try:
            yield number, msgspec.json.decode(line, type=dict[str, Any])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            torn = number


def arrival_fields(request: Request, now: float) -> dict[str, object]:
    """Return the fields of the event by which a request comes at `now`, but for its cached tokens."""
    return {
        "request": request.id,
        "at_s": now,
        "arrival_s": request.arrival_s,
        "prompt": request.prompt_tokens,
        "max_output": request.max_output_tokens,
        "ttft_s": request.slo.ttft_s,
        "tbt_s": request.slo.tbt_s,
        "priority": request.priority,
    }


def batch_fields(
    batch: Batch, elapsed_s: float, stages: Iterable[object], progress: Iterable[RequestProgress], now: float
) -> dict[str, object]:
    """Return the fields of the event by which a batch ends at `now`, but for those of several KV groups.

    stages: begin and end on each pipeline stage, for each part of the batch."""
    parts = [
        (part.group, part.decodes.count, [(chunk.request, chunk.start, chunk.tokens) for chunk in part.prefills])
        for part in batch.parts
    ]
    return {
        "id": batch.id,
        "at_s": now,
        "elapsed_s": elapsed_s,
        "predicted_s": batch.predicted_s,
        "decodes": sum(decodes for _, decodes, _ in parts),
        "kv_sum": sum(part.decodes.kv_sum for part in batch.parts),
        "ended": [one.request for one in progress if one.finished],
        "chunks": [chunk for _, _, chunks in parts for chunk in chunks],
        "parts": [(*part, spans) for part, spans in zip(parts, stages, strict=False)],
    }


def group_fields(batch: Batch) -> dict[str, object]:
    """Return the event-log fields of a batch of several KV groups.

    joins: new shards (group, request, first token). assists: rows attended in other groups (group, request, rows,
    owner).
    """
    joins = [(part.group, op.request, op.start) for part in batch.parts for op in part.kv_ops if op.start]
    assists = [(part.group, a.request, a.rows, a.owner) for part in batch.parts for a in part.assists]
    return {**({"joins": joins} if joins else {}), **({"assists": assists} if assists else {})}


def open_event_log(path: str, attempts: int = ATTEMPTS) -> IO[bytes]:
    """Open an empty event log for appending, locked while it is open.

    The log of an earlier run is renamed first: FILE becomes FILE.until-20260102T030405Z, the time of its last line. A
    path that is not a regular file (a pipe, /dev/null) is opened as it is. Missing folders are made. Raises
    ConfigError when the path cannot be opened or another process writes to it; attempts: how often to try again before
    that, `_PAUSE_S` apart.
    """
    try:
        while True:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            file = os.fdopen(open_output(path), "ab", buffering=0)
            try:
                about = os.fstat(file.fileno())
                if not stat.S_ISREG(about.st_mode):
                    return file
                lock(file.fileno(), attempts)
                # Another process may have renamed the file between open and lock: then open the new one.
                if not _still_there(path, about):
                    file.close()
                    continue
                # Again, under the lock: the previous writer may have written in between.
                about = os.fstat(file.fileno())
                if not about.st_size:
                    return file
                # Not empty: rename it, and open the path again, which makes a new file.
                _keep(os.path.realpath(path), about.st_mtime)
            except BaseException:
                file.close()
                raise
            file.close()
    except BlockingIOError:
        raise ConfigError(f"event-log: another process writes to {path}: give each its own file") from None
    except OSError as error:
        raise ConfigError(f"event-log: {path}: {error.strerror}") from error


def _still_there(path: str, about: os.stat_result) -> bool:
    """Return whether the path still names the open file; another process may have renamed it meanwhile."""
    try:
        return os.path.samestat(os.stat(path), about)
    except FileNotFoundError:
        return False


def _keep(path: str, written_s: float) -> None:
    """Rename an earlier log by the Unix time of its last line; a counter follows where the name is taken."""
    name = f"{path}.until-{datetime.fromtimestamp(written_s, UTC):%Y%m%dT%H%M%SZ}"
    # Two runs may have ended within the same second.
    kept, count = Path(name), 1
    while kept.exists():
        count += 1
        kept = Path(f"{name}-{count}")
    os.rename(path, kept)


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
