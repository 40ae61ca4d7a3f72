"""What a scheduler knows of one request: cursors, lease, deadline. There are no phases, only cursors.

`scheduled` runs ahead of `computed` while chunks are in flight, and both chase `known` = prompt + generated. A prefill
is a request with more than one token to go; a decode has one, and while it is in a `DecodeSet` its cursors are those
of step `settled` of the set.
"""

from __future__ import annotations

from headway.core.request import Request
from headway.kv.ledger import Lease
from headway.scheduling.policy import PrefillFacts


class Sequence:
    """One request in one scheduler. Owned and changed by the scheduler only."""

    __slots__ = (
        "aborted",
        "computed",
        "deadline_s",
        "decoding",
        "generated",
        "in_flight",
        "is_long",
        "last_progress",
        "lease",
        "order",
        "prompt",
        "request",
        "scheduled",
        "settled",
        "skipped_since",
        "slot",
        "started",
        "total_s",
        "work_s",
    )

    def __init__(self, request: Request, order: int, is_long: bool) -> None:
        self.request = request
        self.order = order
        self.is_long = is_long
        self.prompt = request.prompt_tokens
        self.scheduled = self.computed = request.cached_tokens
        self.generated = 0
        self.lease: Lease | None = None
        self.in_flight = 0
        self.aborted = False
        self.started = False
        self.decoding = False
        self.slot = -1
        self.settled = 0
        self.last_progress = 0
        self.skipped_since: float | None = None
        self.total_s = 0.0
        self.work_s = 0.0
        self.deadline_s = 0.0

    @property
    def known(self) -> int:
        return self.prompt + self.generated

    @property
    def remaining(self) -> int:
        return self.prompt + self.generated - self.scheduled

    def facts(self, remaining_s: float) -> PrefillFacts:
        return PrefillFacts(self.request.arrival_s, self.deadline_s, self.total_s, remaining_s)
