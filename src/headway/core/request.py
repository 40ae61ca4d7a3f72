"""What is asked: a `Request`, as every scheduler, placement policy and simulator sees it.

It is immutable. How far it has come (cursors, leases) lives in the scheduler's own sequence state, and what its tokens
are lives in the engine: policies see counts only.
"""

from __future__ import annotations

import msgspec


class Slo(msgspec.Struct, frozen=True):
    """What latency a request was promised. `None` means: the policy's own default applies.

    ttft_s: seconds from arrival to the first output token. tbt_s: seconds between two output tokens.
    """

    ttft_s: float | None = None
    tbt_s: float | None = None


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One request as counts and promises.

    arrival_s is on the clock of whoever schedules it (wall or virtual). `cached_tokens` of the prompt need no work
    (prefix reuse). `priority` has vLLM's polarity: lower goes first; it orders before the policy's own key.
    """

    id: str
    arrival_s: float
    prompt_tokens: int
    max_output_tokens: int
    cached_tokens: int = 0
    slo: Slo = Slo()
    priority: int = 0
