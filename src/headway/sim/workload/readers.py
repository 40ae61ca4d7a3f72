"""Readers of trace files: one row of a table for each format; a file's format is recognised by its columns.

headway    arrival_s, prompt_tokens, output_tokens[, class, cached_tokens, session, think_s]   our own (CSV or JSON)
azure      TIMESTAMP (wall clock), ContextTokens, GeneratedTokens        Azure LLM inference traces 2023, 2024 (CSV)
bailian    chat_id, timestamp (s), input_length, output_length, hash_ids  Qwen-Bailian's, blocks of 16 (JSON Lines)
mooncake   timestamp (ms), input_length, output_length[, hash_ids]        Mooncake FAST'25, blocks of 512 (JSON Lines)
burstgpt   Timestamp (s), Request tokens, Response tokens                 BurstGPT (CSV)
agents     conv, t_s, input_tokens, output_tokens, cached_prefix_tokens  agent sessions (CSV; times within a session)
servegen   timestamp (s), input_tokens, output_tokens                     requests that ServeGen draws (CSV or JSON)
vidur      num_prefill_tokens, num_decode_tokens[, arrived_at]           Vidur's and Sarathi-Serve's files (CSV)

Any of them may be compressed with gzip, or be Parquet where pyarrow is installed. Further columns are ignored. Errors
name the file, the line and the columns.
"""

from __future__ import annotations

import csv
import gzip
import importlib
import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from headway.sim.workload.prompt_text import text_of_blocks, with_session_texts
from headway.sim.workload.trace_request import RequestTrace, TraceError, TraceRequest, class_name

Row = Mapping[str, Any]
# a zero near the stamps keeps their 100 ns in a float
_STAMP_ZERO = datetime(2023, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class TraceFormat:
    """One trace format: the names of its columns. None: it has no such column."""

    arrival: str
    """A file without this optional column has lengths only; see `lengths_alone`."""
    prompt: str
    output: str
    unit_s: float | None = 1.0
    """Seconds in a unit of `arrival`; None: it is a wall clock's stamp."""
    lengths_alone: bool = False
    """Whether `arrival` may be missing."""
    also: tuple[str, ...] = ()
    """Further columns that a file must have."""
    block: int | None = None
    """Tokens of a block of `hash_ids`."""
    klass: str | None = None
    cached: str | None = None
    session: str | None = None
    thread: str | None = None
    think: str | None = None
    session_clock: bool = False
    """Whether times count from each session's own start."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that a file must have."""
        return (*self.also, *(() if self.lengths_alone else (self.arrival,)), self.prompt, self.output)

    def parse(self, row: Row) -> TraceRequest:
        """Return a row's request. Raises KeyError, ValueError or TypeError where it has none."""
        prompt_tokens = _tokens(row, self.prompt)
        cached_tokens = _tokens(row, self.cached) if self.cached and row.get(self.cached) else 0
        if cached_tokens > prompt_tokens:
            raise ValueError(f"{self.cached} is {cached_tokens}, above {self.prompt}, {prompt_tokens}")
        think_s = _seconds(row, self.think) if self.think and row.get(self.think) not in (None, "") else None
        if think_s is not None and think_s < 0:
            raise ValueError(f"{self.think} is {think_s:g}: a request cannot come before the answer that it follows")
        return TraceRequest(
            self._arrival_s(row),
            prompt_tokens,
            _tokens(row, self.output),
            klass=class_name(str(row.get(self.klass) or "")) if self.klass else "",
            cached_tokens=cached_tokens,
            session=str(row[self.session]) if self.session and row.get(self.session) not in (None, "") else None,
            thread=str(row.get(self.thread) or "") if self.thread else "",
            think_s=think_s,
            text=self._text(row, prompt_tokens),
        )

    def _arrival_s(self, row: Row) -> float:
        if self.unit_s is None:
            return _stamp_s(str(row[self.arrival]))
        return _seconds(row, self.arrival) * self.unit_s if self.arrival in row or not self.lengths_alone else 0.0

    def _text(self, row: Row, prompt_tokens: int) -> Any:
        ids = row.get("hash_ids") if self.block else None
        if ids is None or self.block is None:
            return None
        most = -(-prompt_tokens // self.block)
        if len(ids) > most:
            raise ValueError(
                f"hash_ids has {len(ids)} ids, but {prompt_tokens} tokens are {most} blocks of {self.block}"
            )
        return text_of_blocks([int(i) for i in ids], self.block, prompt_tokens)


FORMATS: dict[str, TraceFormat] = {
    "headway": TraceFormat(
        "arrival_s", "prompt_tokens", "output_tokens", klass="class", cached="cached_tokens", session="session",
        think="think_s",
    ),
    "azure": TraceFormat("TIMESTAMP", "ContextTokens", "GeneratedTokens", unit_s=None),
    "bailian": TraceFormat(
        "timestamp", "input_length", "output_length", also=("chat_id", "hash_ids"), block=16, klass="type"
    ),
    "mooncake": TraceFormat("timestamp", "input_length", "output_length", unit_s=1e-3, block=512),
    "burstgpt": TraceFormat("Timestamp", "Request tokens", "Response tokens"),
    "agents": TraceFormat(
        "t_s", "input_tokens", "output_tokens", also=("conv", "cached_prefix_tokens"), cached="cached_prefix_tokens",
        session="conv", thread="agent", think="think_time_s", session_clock=True,
    ),
    "servegen": TraceFormat("timestamp", "input_tokens", "output_tokens"),
    "vidur": TraceFormat("arrived_at", "num_prefill_tokens", "num_decode_tokens", lengths_alone=True),
}  # fmt: skip


def read_trace(file: str | Path, format_name: str | None = None) -> RequestTrace:
    """Read a trace; the format is recognised by its columns unless named. Raises TraceError."""
    path = Path(file)
    if format_name is not None and format_name not in FORMATS:
        raise TraceError(f"unknown trace format {format_name!r}; known are {', '.join(FORMATS)}")
    requests: list[TraceRequest] = []
    chosen, has_arrivals = format_name, True
    for line, row in _rows(path):
        if not requests:
            chosen = chosen or _recognise(path, line, row)
            _demand(path, line, row, chosen)
            has_arrivals = FORMATS[chosen].arrival in row
        assert chosen is not None
        requests.append(_parse(path, line, row, chosen))
    if chosen is None or not requests:
        raise TraceError(f"{path}: holds no requests; {_expected()}")
    session_clock = FORMATS[chosen].session_clock
    requests.sort(key=lambda request: request.arrival_s)
    # session times are relative already
    first_s = 0.0 if session_clock else requests[0].arrival_s
    rebased = [replace(request, arrival_s=request.arrival_s - first_s) for request in requests]
    return RequestTrace(
        path.name, chosen, tuple(with_session_texts(rebased)), has_arrivals=has_arrivals, session_clock=session_clock
    )


def _rows(path: Path) -> Iterator[tuple[int, Row]]:
    """Line number and columns of each request in a CSV or JSON Lines file, compressed or not."""
    try:
        with path.open("rb") as raw:
            # gzip's magic number: the file's name may be anything
            magic = raw.read(4)
            packed = magic[:2] == b"\x1f\x8b"
            raw.seek(0)
            if magic == b"PAR1":
                yield from _parquet_rows(path)
                return
            with io.TextIOWrapper(gzip.GzipFile(fileobj=raw) if packed else raw, "utf-8-sig") as text:
                first = text.readline()
                if first.lstrip().startswith("["):
                    yield from _array_rows(path, first + text.read())
                    return
                rows = _json_rows(path, first, text) if first.lstrip().startswith("{") else _csv_rows(path, first, text)
                yield from rows
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as problem:
        raise TraceError(f"{path}: cannot be read: {problem}") from None


def _parquet_rows(path: Path) -> Iterator[tuple[int, Row]]:
    """Number and columns of each row of a Parquet file."""
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise TraceError(
            f"{path}: is Parquet, which pyarrow reads: pip install pyarrow, or convert it to CSV"
        ) from None
    try:
        batches = parquet.ParquetFile(path).iter_batches()
        yield from enumerate((row for batch in batches for row in batch.to_pylist()), start=1)
    except ValueError as problem:  # of which all errors of pyarrow's format are
        raise TraceError(f"{path}: cannot be read as Parquet: {problem}") from None


def _json_rows(path: Path, first: str, rest: io.TextIOBase) -> Iterator[tuple[int, Row]]:
    line, text = 1, first
    while text:
        if text.strip():
            try:
                row = json.loads(text, object_pairs_hook=_once)
            except ValueError as problem:
                raise TraceError(f"{path}:{line}: not a JSON object ({problem}); {_expected()}") from None
            if not isinstance(row, dict):
                raise TraceError(f"{path}:{line}: not a JSON object; {_expected()}")
            yield line, row
        text = rest.readline()
        line += 1


def _array_rows(path: Path, text: str) -> Iterator[tuple[int, Row]]:
    """Number and columns of each object of a JSON array."""
    try:
        rows = json.loads(text, object_pairs_hook=_once)
    except ValueError as problem:
        raise TraceError(f"{path}: not a JSON array ({problem}); {_expected()}") from None
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise TraceError(f"{path}: entry {number} is not a JSON object; {_expected()}")
        yield number, row


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. Raises ValueError for a repeated name."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"a name is repeated in {', '.join(name for name, _ in pairs)}")
    return found


def _csv_rows(path: Path, first: str, rest: io.TextIOBase) -> Iterator[tuple[int, Row]]:
    header = [name.strip() for name in next(csv.reader([first]), [])]
    twice = sorted({name for name in header if name and header.count(name) > 1})
    if twice:
        raise TraceError(f"{path}:1: the column {twice[0]} is there {header.count(twice[0])} times")
    for line, cells in enumerate(csv.reader(rest), start=2):
        if not cells:
            continue
        if len(cells) != len(header):
            raise TraceError(f"{path}:{line}: {len(cells)} cells under {len(header)} columns ({', '.join(header)})")
        yield line, dict(zip(header, cells, strict=True))


def _recognise(path: Path, line: int, row: Row) -> str:
    if "conversations" in row:
        raise TraceError(
            f"{path}:{line}: holds texts (ShareGPT's form), not lengths: count tokens with the model's tokenizer, and "
            "write a line of prompt_tokens, output_tokens and arrival_s for each request"
        )
    # the first match wins; our own format comes first
    for name, known in FORMATS.items():
        if all(column in row for column in known.columns):
            return name
    raise TraceError(f"{path}:{line}: unknown columns ({', '.join(row)}); {_expected()}")


def _demand(path: Path, line: int, row: Row, name: str) -> None:
    missing = [column for column in FORMATS[name].columns if column not in row]
    if missing:
        raise TraceError(f"{path}:{line}: {name} traces need the columns {', '.join(missing)}; found {', '.join(row)}")


def _parse(path: Path, line: int, row: Row, name: str) -> TraceRequest:
    try:
        return FORMATS[name].parse(row)
    except KeyError as problem:
        raise TraceError(f"{path}:{line}: column {problem} is missing") from None
    except (ValueError, TypeError) as problem:
        columns = ", ".join(FORMATS[name].columns)
        raise TraceError(f"{path}:{line}: {problem}; {name} traces have the columns {columns}") from None


def _expected() -> str:
    return "expected the columns of one of: " + "; ".join(f"{k} ({', '.join(v.columns)})" for k, v in FORMATS.items())


def _tokens(row: Row, column: str) -> int:
    value = row[column]
    # by way of float: some traces write 512.0
    count = float(value)
    if isinstance(value, bool) or not count.is_integer() or not 0 <= count < 1e12:
        raise ValueError(f"{column} is {value!r}, not a count of tokens")
    return int(count)


def _stamp_s(text: str) -> float:
    """Return seconds of a wall clock's stamp; without an offset it is UTC."""
    # the fraction is parsed apart: stamps have seven digits of a second, a datetime keeps six
    whole, _, rest = text.strip().partition(".")
    digits = rest[: len(rest) - len(rest.lstrip("0123456789"))]
    stamp = datetime.fromisoformat(whole + rest[len(digits) :])
    stamp = stamp if stamp.tzinfo else stamp.replace(tzinfo=UTC)
    return (stamp - _STAMP_ZERO).total_seconds() + (float(f"0.{digits}") if digits else 0.0)


def _seconds(row: Row, column: str) -> float:
    value = float(row[column])
    if not abs(value) < 1e15:
        raise ValueError(f"{column} is {row[column]!r}, not a time")
    return value
