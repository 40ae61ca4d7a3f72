"""A request as schedulers, placement policies and simulators see it.

It is immutable. How far it has come (cursors, leases) lives in the scheduler's own sequence state, and what its tokens
are lives in the engine: policies see counts only.
"""

from __future__ import annotations

from typing import Final

import msgspec

BACKGROUND_PRIORITY: Final = 2**63 - 1
"""Of requests that no client waits for, such as prepared documents: the last of all."""


class Slo(msgspec.Struct, frozen=True):
    """Latency targets of a request. None: the policy's own default applies."""

    ttft_s: float | None = None
    """Seconds from arrival to the first output token."""
    tbt_s: float | None = None
    """Seconds between two output tokens."""
    refuse_late: bool = False
    """Refuse the request on arrival if its first token is predicted to be later than `ttft_s`."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts and latency targets of one request."""

    id: str
    arrival_s: float
    """On the scheduler's clock, live or virtual."""
    prompt_tokens: int
    max_output_tokens: int
    cached_tokens: int = 0
    """Tokens of the prompt that need no work (prefix reuse, or KV that was transferred)."""
    slo: Slo = Slo()
    priority: int = 0
    """Lower goes first, as in vLLM; it orders before the policy's own key."""
