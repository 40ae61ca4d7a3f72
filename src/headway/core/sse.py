"""Incremental parser of server-sent events."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SseEvent:
    """One event of a stream."""

    name: str
    """`message` unless the event names itself."""
    data: bytes
    """Data lines, joined by newlines."""


class SseParser:
    """Parser of a byte stream that may be cut anywhere. Lines end in LF or CRLF.

    Comments (keep-alives) and unused fields (`id`, `retry`) are dropped, and so is an event without data, as the WHATWG
    specification requires.
    """

    def __init__(self) -> None:
        self._buffer = b""
        self._name = "message"
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> list[SseEvent]:
        """Add bytes; return the events that they complete, in order."""
        lines = (self._buffer + chunk).split(b"\n")
        # The part after the last newline is an incomplete line, or empty.
        self._buffer = lines.pop()
        events: list[SseEvent] = []
        for raw in lines:
            self._line(raw.removesuffix(b"\r"), events)
        return events

    def _line(self, line: bytes, events: list[SseEvent]) -> None:
        if not line:
            if self._data:
                events.append(SseEvent(self._name, b"\n".join(self._data)))
            self._name, self._data = "message", []
            return
        field, _, value = line.partition(b":")
        # One space after the colon is not part of the value.
        value = value.removeprefix(b" ")
        if field == b"data":
            self._data.append(value)
        elif field == b"event":
            self._name = value.decode("utf-8", "replace")
