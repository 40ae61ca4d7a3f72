"""The record of one request: its times and counts, from a load client or a simulator alike."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SloTargets:
    """The latency objectives of one request, in seconds; `None`: no such objective."""

    ttft_s: float | None = None
    """Bound of the time to the first token."""
    tbt_s: float | None = None
    """Bound of *every* gap between two tokens."""
    tpot_s: float | None = None
    """Bound of the mean gap between tokens."""
    e2e_s: float | None = None
    """Bound of the time from arrival to finish."""

    def any(self) -> bool:
        """Return whether there is any objective."""
        return any(value is not None for value in (self.ttft_s, self.tbt_s, self.tpot_s, self.e2e_s))


NO_TARGETS = SloTargets()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request from arrival to end; built when it has ended, well or badly, or when a run stops observing it.

    All times are seconds on one clock, from the run's own zero.
    """

    id: str
    klass: str
    arrival_s: float
    """When the request was *due*: latencies count from there, so a client that falls behind makes them worse."""
    prompt_tokens: int
    output_tokens: int = 0
    """The server's own count where it gave one; may exceed `len(token_s)`."""
    sent_s: float | None = None
    """When the request was really sent."""
    scheduled_s: float | None = None
    """When the request was first scheduled, if recorded."""
    token_s: tuple[float, ...] = ()
    """One time for each output token that was seen, in order; tokens that arrive in one chunk share a time."""
    finish_s: float | None = None
    slo: SloTargets = NO_TARGETS
    finish_reason: str | None = None
    """The server's reason ("length", "stop", …) where the request succeeded."""
    error: str | None = None
    """None exactly when the request succeeded."""
    rejected: bool = False
    """The request was refused before it was scheduled."""
    text: str | None = None
    cached_tokens: int = 0
    """Tokens of the prompt that were not computed, because their KV was cached."""

    @property
    def ok(self) -> bool:
        """Whether the request ended and ended well."""
        return self.error is None and self.finish_s is not None

    @property
    def first_token_s(self) -> float | None:
        """When the first output token was there; None if none came."""
        return self.token_s[0] if self.token_s else None
