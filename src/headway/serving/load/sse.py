"""Server-sent events, read as they come: bytes in, whole events out."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SseEvent:
    """One event: its name (`message` unless the server said otherwise) and its data lines joined by newlines."""

    name: str
    data: bytes


class SseParser:
    """Feed it whatever the socket delivers; it returns the events that are complete by then.

    Comments (keep-alives) and fields that we have no use for (`id`, `retry`) are dropped. Lines may end in LF or CRLF
    and be cut anywhere. An event without data is dropped, as the WHATWG specification demands.
    """

    def __init__(self) -> None:
        self._buffer = b""
        self._name = "message"
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> list[SseEvent]:
        """Take bytes; return the events which they completed, in order."""
        lines = (self._buffer + chunk).split(b"\n")
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
        value = value.removeprefix(b" ")
        if field == b"data":
            self._data.append(value)
        elif field == b"event":
            self._name = value.decode("utf-8", "replace")
