"""Events that a scheduler returns: facts with a time, in the order in which they became true."""

from __future__ import annotations

from typing import Literal

import msgspec


class RequestEvent(msgspec.Struct, frozen=True, gc=False):
    """Change of one request's state."""

    kind: Literal["started", "finished", "aborted", "preempted", "staged"]
    """started: its first chunk has been computed. finished: all output is there. aborted: freed before its end.
    preempted: its KV was freed and must be computed again. staged: it left the scheduler and its KV is kept, for a
    transfer or for its next phase."""
    request: str
    at_s: float
    tokens: int = 0
    """preempted: tokens to compute again. staged: tokens of KV that are kept."""
