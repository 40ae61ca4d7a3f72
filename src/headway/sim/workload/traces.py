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
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from headway.core.errors import ConfigError
from headway.core.file_sections import shown
from headway.core.files import open_input


class TraceError(ConfigError):
    """Raised when a trace cannot be read or used. The message names the file, the line and the expected content."""


def class_name(name: str) -> str:
    """Return the name of a class of requests. Raises ValueError for the one that reports have for all of them."""
    if name == "all":
        raise ValueError("class is 'all', as reports name the sum of all classes: give it another name")
    return name


MOST_REQUESTS = 5_000_000
"""Most requests of a workload: each takes half a kilobyte, and its simulation some 100 µs or more."""


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


_LONGEST_LINE, _LONGEST_ROW = 128 << 20, 1 << 20
"""Characters of a line of JSON, which may be a whole session, and of another file's."""
_SHOWN = 200
_CHARACTERS = 4
"""Characters of a token in English text, for files that hold texts."""
_ANSWERS = ("gpt", "assistant", "chatgpt", "bing", "bard", "model")
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
    if not all(type(i) is int and 0 <= i < 1 << _PIECE_BITS for i in ids):
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

    That is the thread's last prompt if it and its answer are long enough, else the session's latest prompt that is,
    else as much as the thread's last has. Where a thread's prompt repeats the whole one before it (but for a block of
    `grain` tokens, in which traces count) and has room for the answer, it repeats the answer too. `requests`: in order
    of time within each session; those without one stay."""
    texts: list[TraceRequest] = []
    # By session: places in `texts` of its requests; by thread: of the last one.
    earlier: dict[str, list[int]] = {}
    last: dict[tuple[str, str], int] = {}
    for number, request in enumerate(requests):
        if request.session is None or request.text is not None:
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
    if last is not None and texts[last].prompt_tokens + texts[last].output_tokens >= shared:
        return last
    return next((i for i in reversed(earlier) if texts[i].prompt_tokens >= shared), last)


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
        ids, block = row.get("hash_ids"), self.block or row.get("block_size")
        if ids is None or block is None:
            return None
        if not isinstance(ids, list):
            raise ValueError(f"hash_ids is {ids!r}, not a list of numbers")
        most = -(-prompt_tokens // block)
        if len(ids) > most:
            raise ValueError(f"hash_ids has {len(ids)} ids, but {prompt_tokens} tokens are {most} blocks of {block}")
        return text_of_blocks(ids, block, prompt_tokens)


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
    "weka": TraceFormat(
        "t", "in", "out", also=("session", "thread", "block_size"), session="session", thread="thread",
        think="think_time", session_clock=True,
    ),
    "sharegpt": TraceFormat(
        "arrival_s", "human", "gpt", lengths_alone=True, also=("conversation",), cached="cached",
        session="conversation",
    ),
    "vidur": TraceFormat("arrived_at", "num_prefill_tokens", "num_decode_tokens", lengths_alone=True),
}  # fmt: skip


def read_trace(file: str | Path, format_name: str | None = None) -> RequestTrace:
    """Read a trace; the format is recognised by its columns unless named. Raises TraceError."""
    path = Path(file)
    if format_name is not None and format_name not in FORMATS:
        raise TraceError(f"unknown trace format {format_name!r}; known are {', '.join(FORMATS)}")
    requests: list[TraceRequest] = []
    chosen, has_arrivals = format_name, True
    known: dict[tuple[int, int], int] = {}
    for line, row in _each_request(path, _rows(path), known):
        if not requests:
            chosen = chosen or _recognise(path, line, row)
            _demand(path, line, row, chosen)
            has_arrivals = FORMATS[chosen].arrival in row
        assert chosen is not None
        requests.append(_parse(path, line, row, chosen))
        if len(requests) > MOST_REQUESTS:
            raise TraceError(f"{path}: holds more than {MOST_REQUESTS:,} requests: cut it into parts")
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
        with open_input(path) as raw:
            # gzip's magic number: the file's name may be anything
            magic = raw.read(4)
            packed = magic[:2] == b"\x1f\x8b"
            raw.seek(0)
            if magic == b"PAR1":
                yield from _parquet_rows(path)
                return
            with io.TextIOWrapper(gzip.GzipFile(fileobj=raw) if packed else raw, "utf-8-sig") as text:
                lines = _lines(path, text)
                first = next(lines, "")
                if first.lstrip().startswith("["):
                    yield from _array_rows(path, _whole(path, first, text))
                elif first.strip() == "{":
                    yield 1, _object(path, 1, _whole(path, first, text))
                else:
                    yield from (_json_rows if first.lstrip().startswith("{") else _csv_rows)(path, first, lines)
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


def _lines(path: Path, text: io.TextIOBase) -> Iterator[str]:
    """Yield the lines. Raises TraceError for one that no request has."""
    number = 0
    while line := text.readline(_LONGEST_LINE + 1):
        number += 1
        if len(line) > (_LONGEST_LINE if line[:1] in "[{" else _LONGEST_ROW):
            raise TraceError(f"{path}:{number}: a line of more than {len(line) - 1:,} characters is no request")
        yield line


def _whole(path: Path, first: str, rest: io.TextIOBase) -> str:
    """Return all of a file that is one JSON value."""
    text = first + rest.read(_LONGEST_LINE + 1)
    if len(text) > _LONGEST_LINE:
        raise TraceError(
            f"{path}: one JSON value of more than {_LONGEST_LINE >> 20} MiB: write a line for each request"
        )
    return text


def _json_rows(path: Path, first: str, rest: Iterator[str]) -> Iterator[tuple[int, Row]]:
    for line, text in enumerate(chain([first], rest), start=1):
        if text.strip():
            yield line, _object(path, line, text)


def _object(path: Path, line: int, text: str) -> Row:
    try:
        row = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as problem:
        raise TraceError(f"{path}:{line}: not a JSON object ({problem}); {_expected()}") from None
    if not isinstance(row, dict):
        raise TraceError(f"{path}:{line}: not a JSON object; {_expected()}")
    return row


def _array_rows(path: Path, text: str) -> Iterator[tuple[int, Row]]:
    """Number and columns of each object of a JSON array."""
    try:
        rows = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as problem:
        raise TraceError(f"{path}: not a JSON array ({problem}); {_expected()}") from None
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise TraceError(f"{path}: entry {number} is not a JSON object; {_expected()}")
        yield number, row


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. Raises ValueError for a repeated name."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"the name {shown(twice)} is repeated")
    return found


def _csv_rows(path: Path, first: str, rest: Iterator[str]) -> Iterator[tuple[int, Row]]:
    header = [name.strip() for name in next(csv.reader([first]), [])]
    twice = next((name for name, count in Counter(header).items() if name and count > 1), None)
    if twice is not None:
        raise TraceError(f"{path}:1: the column {shown(twice)} is there {header.count(twice)} times")
    reader = csv.reader(rest)
    for cells in reader:
        line = reader.line_num + 1
        if not cells:
            continue
        if len(cells) != len(header):
            raise TraceError(f"{path}:{line}: {len(cells)} cells under {len(header)} columns ({_names(header)})")
        yield line, dict(zip(header, cells, strict=True))


def _each_request(
    path: Path, rows: Iterable[tuple[int, Row]], known: dict[tuple[int, int], int]
) -> Iterator[tuple[int, Row]]:
    """Yield the rows, and in place of one that is a whole session its requests. known: numbers of its blocks' ids."""
    for number, (line, row) in enumerate(rows):
        try:
            if "conversations" in row:
                yield from ((line, turn) for turn in _sharegpt(row, number))
            elif isinstance(row.get("requests"), list):
                yield from ((line, one) for one in _weka(row, number, known))
            else:
                yield line, row
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as problem:
            raise TraceError(f"{path}:{line}: not a session: {problem!r}") from None


def _weka(session: Row, number: int, known: dict[tuple[int, int], int]) -> Iterator[Row]:
    """Yield the requests of an agent's session (weka's kv-cache-tester, AgentX), those of its subagents as threads.

    Ids of blocks hold within a session: all sessions of a file are numbered anew."""
    about = {"session": session.get("id", number), "block_size": int(session["block_size"])}

    def one(request: Row, thread: str, since_s: float) -> Row:
        ids = [known.setdefault((number, int(i)), len(known)) for i in request.get("hash_ids") or ()]
        most = -(-int(request["in"]) // about["block_size"])
        return {**request, **about, "thread": thread, "t": float(request["t"]) + since_s, "hash_ids": ids[:most]}

    for entry in session["requests"]:
        inner = entry.get("requests")
        if inner is None:
            yield one(entry, "", 0.0)
        elif inner:
            # times of a subagent count from its own start in some files
            since_s = float(entry["t"]) if float(inner[0]["t"]) < float(entry["t"]) else 0.0
            yield from (one(request, str(entry.get("agent_id", "agent")), since_s) for request in inner)


def _sharegpt(session: Row, number: int) -> Iterator[Row]:
    """Yield a request for each answer of a conversation. Lengths are estimates: four characters a token."""
    before = cached = 0
    for turn in session["conversations"]:
        speaker = turn.get("from", turn.get("role"))
        tokens = -(-len(turn.get("value", turn.get("content", ""))) // _CHARACTERS)
        if speaker in _ANSWERS and before and tokens:
            yield {
                "conversation": session.get("id", number), "human": before, "gpt": tokens, "cached": cached,
            }  # fmt: skip
            cached = before + tokens
        before += tokens


def _names(columns: Iterable[str]) -> str:
    """Return names of columns as errors show them."""
    text = ", ".join(columns)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _recognise(path: Path, line: int, row: Row) -> str:
    # the first match wins; our own format comes first
    for name, known in FORMATS.items():
        if all(column in row for column in known.columns):
            return name
    raise TraceError(f"{path}:{line}: unknown columns ({_names(row)}); {_expected()}")


def _demand(path: Path, line: int, row: Row, name: str) -> None:
    missing = [column for column in FORMATS[name].columns if column not in row]
    if missing:
        raise TraceError(f"{path}:{line}: {name} traces need the columns {', '.join(missing)}; found {_names(row)}")


def _parse(path: Path, line: int, row: Row, name: str) -> TraceRequest:
    try:
        return FORMATS[name].parse(row)
    except KeyError as problem:
        raise TraceError(f"{path}:{line}: column {problem} is missing") from None
    except (ValueError, TypeError, ArithmeticError, AttributeError, LookupError) as problem:
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
    if isinstance(row[column], bool) or not abs(value) < 1e15:
        raise ValueError(f"{column} is {row[column]!r}, not a time")
    return value
