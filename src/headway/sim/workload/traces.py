"""Traces: a request as traces have it, readers of public formats, and the texts that prompts share.

Further columns are ignored. Errors name the file, the line and the columns.
"""

from __future__ import annotations

import csv
import gzip
import importlib
import io
import json
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from headway.core.errors import ConfigError


class TraceError(ConfigError):
    """Raised when a trace cannot be read or used. The message names the file, the line and the expected content."""


def class_name(name: str) -> str:
    """Return the name of a class of requests. Raises ValueError for the one that reports have for all of them."""
    if name == "all":
        raise ValueError("class is 'all', as reports name the sum of all classes: give it another name")
    return name


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """Arrival time and lengths of one request."""

    arrival_s: float
    """Seconds since the workload's start."""
    prompt_tokens: int
    """The whole prompt, cached tokens included."""
    output_tokens: int
    klass: str = ""
    cached_tokens: int = 0
    """Prefix shared with an earlier request of the session; a server with a prefix cache need not compute it again."""
    session: str | None = None
    """A conversation or an agent's run that the request belongs to."""
    thread: str = ""
    """Sequence of requests within the session, such as one agent's, of which each follows the answer before."""
    think_s: float | None = None
    """Seconds from the end of the answer before it in its thread to this request; None: not known."""
    text: PromptText | None = None
    """Which prompts begin alike; None: the trace does not say."""
    waits: bool = False
    """Whether the request comes `think_s` after the thread's answer before it ends, instead of at `arrival_s`."""
    priority: int = 0
    """As in `core.request`: lower goes first."""

    def __post_init__(self) -> None:
        # Tables give NumPy's numbers, which compiled modules (`scripts/compiled_modules.py`) refuse.
        for name, kind in (("arrival_s", float), ("prompt_tokens", int), ("output_tokens", int)):
            if type(getattr(self, name)) is not kind:
                object.__setattr__(self, name, kind(getattr(self, name)))


@dataclass(frozen=True)
class RequestTrace:
    """A trace as read: requests by arrival, rebased so that the first one arrives at 0."""

    name: str
    format: str
    requests: tuple[TraceRequest, ...]
    has_arrivals: bool = True
    """False for files of lengths only; give such a trace arrival times before replaying it."""
    session_clock: bool = False
    """True where times count from each session's own start, because the file has no common clock; start the sessions
    with `transforms.start_sessions`."""


_BLOCK_BITS = 20
"""Bits of a block's place in a key: prompts of up to 2^20 blocks."""
_PIECE_BITS = 32
_end = attrgetter("end")
_UNIQUE = 1 << 20
"""Above all namespaces: of texts that share nothing."""


class TextPiece(NamedTuple):
    """A stretch of a text. Two texts that have a piece of the same id are equal up to its shorter end."""

    end: int
    """Tokens from the start of the prompt to the end of the piece."""
    id: int


@dataclass(frozen=True, slots=True)
class PromptText:
    """A prompt, and its answer where a later prompt repeats it."""

    pieces: tuple[TextPiece, ...]
    """In order, without gaps."""
    namespace: int = 0
    """Texts of different namespaces (trace files) share nothing."""

    @property
    def tokens(self) -> int:
        return self.pieces[-1].end if self.pieces else 0

    def keys(self, block_tokens: int) -> list[int]:
        """Return the keys of all full blocks: equal exactly where the trace says that two prefixes are equal.

        A block is known by the piece in which it ends. With blocks that do not divide the trace's, a hit may be shorter
        than the trace allows by less than one of its blocks."""
        keys: list[int] = []
        for end, piece in self.pieces:
            base = ((self.namespace << _PIECE_BITS) + piece) << _BLOCK_BITS
            keys.extend(range(base + len(keys), base + end // block_tokens))
        return keys

    def cut(self, tokens: int) -> PromptText:
        """Return the text up to `tokens`."""
        if tokens >= self.tokens:
            return self
        place = bisect_left(self.pieces, tokens, key=_end)
        return PromptText((*self.pieces[:place], TextPiece(tokens, self.pieces[place].id)), self.namespace)

    def and_then(self, end: int, piece: int) -> PromptText:
        """Return the text with another piece behind it, up to token `end`."""
        return PromptText((*self.pieces, TextPiece(end, piece)), self.namespace) if end > self.tokens else self

    def and_unique(self, end: int, number: int) -> PromptText:
        """Return the text up to token `end`, of which nothing new is in a text of another number."""
        return self.and_then(end, (_UNIQUE << _PIECE_BITS) + number)


def text_of_blocks(ids: Sequence[int], block_tokens: int, prompt_tokens: int) -> PromptText:
    """Return the text of a prompt whose blocks have these ids, each of which stands for the whole prefix that it ends.

    What the ids do not cover is not known to be shared. Raises ValueError for an id that is none."""
    if not all(0 <= i < 1 << _PIECE_BITS for i in ids):
        raise ValueError("hash_ids must be whole numbers from 0 to 2^32 - 1")
    ends = range(block_tokens, prompt_tokens + block_tokens, block_tokens)
    return PromptText(tuple(TextPiece(min(end, prompt_tokens), i) for end, i in zip(ends, ids, strict=False)))


def shared_tokens(requests: Iterable[TraceRequest], block_tokens: int) -> int:
    """Return how many prompt tokens one infinite cache has, in which each prompt, and its answer if known, is at once.

    The last token of a prompt is always computed."""
    cached: set[int] = set()
    hits = 0
    for request in requests:
        if request.text is None:
            continue
        keys = request.text.keys(block_tokens)
        shareable = keys[: (request.prompt_tokens - 1) // block_tokens]
        hits += next((n for n, key in enumerate(shareable) if key not in cached), len(shareable)) * block_tokens
        cached.update(keys)
    return hits


def with_session_texts(requests: Iterable[TraceRequest], grain: int = 64) -> list[TraceRequest]:
    """Give the requests of sessions texts: each begins with the `cached_tokens` of an earlier prompt of its session.

    That is the thread's last prompt if it is long enough, else the session's latest that is. Where a thread's prompt
    repeats the whole one before it (but for a block of `grain` tokens, in which traces count) and has room for the
    answer, it repeats the answer too. `requests`: in order of time within each session; those without one stay."""
    texts: list[TraceRequest] = []
    # By session: places in `texts` of its requests; by thread: of the last one.
    earlier: dict[str, list[int]] = {}
    last: dict[tuple[str, str], int] = {}
    for number, request in enumerate(requests):
        if request.session is None:
            texts.append(request)
            continue
        thread = (request.session, request.thread)
        source = _source(request, texts, earlier.get(request.session, []), last.get(thread))
        text = PromptText(())
        if source is not None:
            before = texts[source]
            known = before.prompt_tokens + before.output_tokens
            assert before.text is not None
            if _repeats(request, before, grain) and source == last.get(thread):
                text = before.text.cut(before.prompt_tokens).and_then(known, _answer(source))
                texts[source] = replace(before, text=text)
            else:
                text = before.text.cut(request.cached_tokens)
        texts.append(replace(request, text=text.and_then(request.prompt_tokens, 2 * number)))
        earlier.setdefault(request.session, []).append(number)
        last[thread] = number
    return texts


def _answer(number: int) -> int:
    """Id of the piece that is a request's answer; even ones are of prompts."""
    return 2 * number + 1


def _source(request: TraceRequest, texts: list[TraceRequest], earlier: list[int], last: int | None) -> int | None:
    shared = request.cached_tokens
    if not shared:
        return None
    if last is not None and texts[last].prompt_tokens >= shared:
        return last
    return next((i for i in reversed(earlier) if texts[i].prompt_tokens >= shared), None)


def _repeats(request: TraceRequest, before: TraceRequest, grain: int) -> bool:
    whole = before.prompt_tokens - before.prompt_tokens % grain
    return request.cached_tokens >= whole and request.prompt_tokens >= before.prompt_tokens + before.output_tokens


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
