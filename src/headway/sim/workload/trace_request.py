"""One request of a workload, and a recorded trace: a list of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from headway.core.errors import ConfigError

if TYPE_CHECKING:
    from headway.sim.workload.prompt_text import PromptText


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
