"""What a scheduler tells its surroundings: facts with a time, in the order in which they became true."""

from __future__ import annotations

from typing import Literal

import msgspec


class RequestEvent(msgspec.Struct, frozen=True, gc=False):
    """Something that happened to one request at `at_s`.

    started: its first chunk was scheduled. finished: all output is there. aborted: freed before its end.
    preempted: its KV was given up and `tokens` of work must be done again. staged: its prefill, all that was asked for,
    is done; KV of `tokens` tokens stays.
    """

    kind: Literal["started", "finished", "aborted", "preempted", "staged"]
    request: str
    at_s: float
    tokens: int = 0
