"""What happened to one request: times and counts, nothing about how they were obtained."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SloTargets:
    """The objectives that one request is judged by, in seconds; `None` means that it is not judged by that one.

    ttft_s bounds the time to the first token, tbt_s *every* gap between two tokens, tpot_s their mean, e2e_s the whole.
    """

    ttft_s: float | None = None
    tbt_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    def any(self) -> bool:
        """Whether there is anything to judge by."""
        return any(value is not None for value in (self.ttft_s, self.tbt_s, self.tpot_s, self.e2e_s))


NO_TARGETS = SloTargets()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request from arrival to end; built when it has ended, well or badly, or when a run stops observing it.

    All times are seconds on one clock (the run's own zero). `arrival_s` is when the request was *due*: latencies count
    from there, so that a client which falls behind makes latencies worse, not better. `sent_s` is when it really left.
    `token_s` holds one time per output token that was seen, in order; tokens that arrive in one chunk share a time.
    `output_tokens` is the server's own count where it gave one, and may exceed `len(token_s)`.
    `error` is None exactly when the request succeeded; then `finish_reason` is the server's ("length", "stop", …).
    """

    id: str
    klass: str
    arrival_s: float
    prompt_tokens: int
    output_tokens: int = 0
    sent_s: float | None = None
    scheduled_s: float | None = None
    token_s: tuple[float, ...] = ()
    finish_s: float | None = None
    slo: SloTargets = NO_TARGETS
    finish_reason: str | None = None
    error: str | None = None
    rejected: bool = False
    """The request was refused before it was scheduled."""
    text: str | None = None

    @property
    def ok(self) -> bool:
        """Whether the request ended and ended well."""
        return self.error is None and self.finish_s is not None

    @property
    def first_token_s(self) -> float | None:
        """When the first output token was there; None if none came."""
        return self.token_s[0] if self.token_s else None
