"""Readers of trace files, one for each format; a file's format is recognised by its columns.

azure      TIMESTAMP (wall clock), ContextTokens, GeneratedTokens        Azure LLM inference traces 2023, 2024 (CSV)
mooncake   timestamp (ms), input_length, output_length[, hash_ids]        Mooncake FAST'25 traces (JSON Lines)
agents     conv, t_s, input_tokens, output_tokens, cached_prefix_tokens  agent sessions (CSV; times within a session)
vidur      num_prefill_tokens, num_decode_tokens[, arrived_at]           Vidur's and Sarathi-Serve's files (CSV)
headway    arrival_s, prompt_tokens, output_tokens[, class, cached_tokens, session, think_s]   our own (CSV or JSON)

Any of them may be compressed with gzip. Further columns are ignored. Errors name the file, the line and the columns.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from headway.sim.workload.prompt_text import text_of_blocks, with_session_texts
from headway.sim.workload.trace_request import RequestTrace, TraceError, TraceRequest, class_name

Row = Mapping[str, Any]
# stamps are UTC; a zero near them keeps their 100 ns in a float
_AZURE_ZERO = datetime(2023, 1, 1)
_MOONCAKE_BLOCK = 512
"""Tokens of a block of `hash_ids`."""


@dataclass(frozen=True)
class TraceFormat:
    """One trace format."""

    columns: tuple[str, ...]
    """Columns that a file must have; others are ignored."""
    parse: Callable[[Row], TraceRequest]
    arrivals: str | None
    """Column of arrival times; a file without it has lengths only."""
    session_clock: bool = False
    """Whether times count from each session's own start."""


def _azure(row: Row) -> TraceRequest:
    # the fraction is parsed apart: stamps have seven digits of a second, a datetime keeps six
    stamp, _, fraction = str(row["TIMESTAMP"]).partition(".")
    digits = fraction.partition("+")[0].rstrip("Z")
    whole_s = (datetime.fromisoformat(stamp.partition("+")[0]) - _AZURE_ZERO).total_seconds()
    arrival_s = whole_s + (float(f"0.{digits}") if digits else 0.0)
    return TraceRequest(arrival_s, _tokens(row, "ContextTokens"), _tokens(row, "GeneratedTokens"))


def _mooncake(row: Row) -> TraceRequest:
    prompt_tokens, ids = _tokens(row, "input_length"), row.get("hash_ids")
    text = None if ids is None else text_of_blocks([int(i) for i in ids], _MOONCAKE_BLOCK, prompt_tokens)
    return TraceRequest(_seconds(row, "timestamp") / 1000, prompt_tokens, _tokens(row, "output_length"), text=text)


def _agents(row: Row) -> TraceRequest:
    return TraceRequest(
        _seconds(row, "t_s"),
        _tokens(row, "input_tokens"),
        _tokens(row, "output_tokens"),
        cached_tokens=_tokens(row, "cached_prefix_tokens"),
        session=str(row["conv"]),
        thread=str(row.get("agent") or ""),
        think_s=_seconds(row, "think_time_s") if row.get("think_time_s") else None,
    )


def _vidur(row: Row) -> TraceRequest:
    arrival_s = _seconds(row, "arrived_at") if "arrived_at" in row else 0.0
    return TraceRequest(arrival_s, _tokens(row, "num_prefill_tokens"), _tokens(row, "num_decode_tokens"))


def _headway(row: Row) -> TraceRequest:
    return TraceRequest(
        _seconds(row, "arrival_s"),
        _tokens(row, "prompt_tokens"),
        _tokens(row, "output_tokens"),
        klass=class_name(str(row.get("class") or "")),
        cached_tokens=_tokens(row, "cached_tokens") if row.get("cached_tokens") else 0,
        session=str(row["session"]) if row.get("session") else None,
        think_s=_seconds(row, "think_s") if row.get("think_s") else None,
    )


FORMATS: dict[str, TraceFormat] = {
    "headway": TraceFormat(("arrival_s", "prompt_tokens", "output_tokens"), _headway, "arrival_s"),
    "azure": TraceFormat(("TIMESTAMP", "ContextTokens", "GeneratedTokens"), _azure, "TIMESTAMP"),
    "mooncake": TraceFormat(("timestamp", "input_length", "output_length"), _mooncake, "timestamp"),
    "agents": TraceFormat(
        ("conv", "t_s", "input_tokens", "output_tokens", "cached_prefix_tokens"), _agents, "t_s", session_clock=True
    ),
    "vidur": TraceFormat(("num_prefill_tokens", "num_decode_tokens"), _vidur, "arrived_at"),
}


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
            has_arrivals = FORMATS[chosen].arrivals in row
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
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            with io.TextIOWrapper(gzip.GzipFile(fileobj=raw) if packed else raw, "utf-8-sig") as text:
                first = text.readline()
                rows = _json_rows(path, first, text) if first.lstrip().startswith("{") else _csv_rows(path, first, text)
                yield from rows
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as problem:
        raise TraceError(f"{path}: cannot be read: {problem}") from None


def _json_rows(path: Path, first: str, rest: io.TextIOBase) -> Iterator[tuple[int, Row]]:
    line, text = 1, first
    while text:
        if text.strip():
            try:
                row = json.loads(text)
            except ValueError as problem:
                raise TraceError(f"{path}:{line}: not a JSON object ({problem}); {_expected()}") from None
            if not isinstance(row, dict):
                raise TraceError(f"{path}:{line}: not a JSON object; {_expected()}")
            yield line, row
        text = rest.readline()
        line += 1


def _csv_rows(path: Path, first: str, rest: io.TextIOBase) -> Iterator[tuple[int, Row]]:
    header = [name.strip() for name in next(csv.reader([first]), [])]
    for line, cells in enumerate(csv.reader(rest), start=2):
        if not cells:
            continue
        if len(cells) != len(header):
            raise TraceError(f"{path}:{line}: {len(cells)} cells under {len(header)} columns ({', '.join(header)})")
        yield line, dict(zip(header, cells, strict=True))


def _recognise(path: Path, line: int, row: Row) -> str:
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


def _seconds(row: Row, column: str) -> float:
    value = float(row[column])
    if not abs(value) < 1e15:
        raise ValueError(f"{column} is {row[column]!r}, not a time")
    return value
