"""One request of a workload, and a recorded trace: a list of them."""

from __future__ import annotations

from dataclasses import dataclass

from headway.core.errors import ConfigError


class TraceError(ConfigError):
    """Raised when a trace cannot be read or used. The message names the file, the line and the expected content."""


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
