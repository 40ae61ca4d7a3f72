"""State of one request in the iteration policy: cursor, deadline, predicted work, place in the queue."""

from __future__ import annotations

from headway.core.request import Request
from headway.policy.iteration.ordering import PrefillFacts

WHOLE = 1 << 62
"""The shard limit of a request whose KV lies in one group."""


class PrefillState:
    """One request on one engine instance, from its arrival to its end. Cursors are in tokens, times in seconds.

    Changed by `IterationPolicy`, except for the cursors of decoding requests, which the scheduler may keep here."""

    __slots__ = (
        "base",
        "deadline_s",
        "decoding",
        "generated",
        "holds_kv",
        "is_long",
        "last_progress",
        "limit",
        "order",
        "prompt",
        "request",
        "scheduled",
        "skipped_since",
        "slot",
        "total_s",
        "work_s",
    )

    def __init__(self, request: Request, order: int) -> None:
        self.request = request
        self.order = order  # of arrival: breaks ties, and says which request is the youngest
        self.is_long = False
        self.prompt = request.prompt_tokens
        self.generated = 0  # output tokens, all of which are computed again when the KV is lost
        self.scheduled = request.cached_tokens  # tokens that are computed or in flight
        self.holds_kv = False
        self.base = 0  # first token of the shard in this group
        self.limit = WHOLE  # most tokens of that shard
        self.decoding = False
        self.slot = -1  # place in the queue; negative: not in it
        self.last_progress = 0  # the iteration in which it got tokens last
        self.skipped_since: float | None = None  # when admission failed first, for want of KV
        self.total_s = 0.0  # isolated prefill time when it came
        self.work_s = 0.0  # what of that is left
        self.deadline_s = 0.0  # when the first token is due

    @property
    def known(self) -> int:
        """Tokens whose KV must be computed: the prompt and what has been generated."""
        return self.prompt + self.generated

    @property
    def remaining(self) -> int:
        return self.prompt + self.generated - self.scheduled

    @property
    def room(self) -> int:
        """Tokens that may be scheduled here before this group's shard is full."""
        return self.base + self.limit - self.scheduled

    def facts(self, remaining_s: float) -> PrefillFacts:
        return PrefillFacts(self.request.arrival_s, self.deadline_s, self.total_s, remaining_s)
