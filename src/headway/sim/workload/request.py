"""One request of a workload, and a trace: a list of them that somebody recorded."""

from __future__ import annotations

from dataclasses import dataclass

from headway.core.errors import ConfigError


class TraceError(ConfigError):
    """A trace cannot be read or used; the message names the file, the line and what was expected there."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """When it arrives (seconds since the workload's start) and how long it is (tokens).

    `prompt_tokens` is the whole prompt; `cached_tokens` of it were shared with an earlier request of the same `session`
    (a conversation or an agent's run), which a server with a prefix cache need not compute again.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    klass: str = ""
    cached_tokens: int = 0
    session: str | None = None


@dataclass(frozen=True)
class RequestTrace:
    """A trace as read: requests by arrival, rebased so that the first one arrives at 0.

    has_arrivals: False for files of lengths only; give such a trace arrival times before replaying it.
    session_clock: True where times count from each session's own start, because the file has no common clock; start the
    sessions with `transforms.start_sessions`.
    """

    name: str
    format: str
    requests: tuple[TraceRequest, ...]
    has_arrivals: bool = True
    session_clock: bool = False
