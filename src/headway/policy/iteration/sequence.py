"""What a scheduler knows of one request: cursors, lease, deadline. There are no phases, only cursors.

`scheduled` runs ahead of `computed` while chunks are in flight, and both chase `known` = prompt + generated. A prefill
is a request with more than one token to go; a decode has one, and while it is in a `DecodeSet` its cursors are those
of step `settled` of the set.
"""

from __future__ import annotations

from headway.core.request import Request
from headway.kv.block_manager import KvLease
from headway.kv.kv_shards import KvShardLease
from headway.policy.iteration.ordering import PrefillFacts

WHOLE = 1 << 62
"""The limit of a request that lives in one group."""


class SequenceState:
    """One request in one group. Owned and changed by the group's scheduler only.

    A request may have more groups than this one (KVP): this group holds its tokens from `base` on, at most `limit` of
    them, and computes its rows; `shards` are the earlier tokens, in other groups, in order. One that `hands_over` ends
    with its next token, and its KV goes into custody.
    """

    __slots__ = (
        "aborted",
        "base",
        "computed",
        "deadline_s",
        "decoding",
        "generated",
        "hands_over",
        "in_flight",
        "is_long",
        "last_progress",
        "lease",
        "limit",
        "order",
        "prompt",
        "request",
        "scheduled",
        "settled",
        "shards",
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
        self.lease: KvLease | None = None
        self.base = 0
        self.limit = WHOLE
        self.shards: tuple[KvShardLease, ...] = ()
        self.in_flight = 0
        self.aborted = False
        self.started = False
        self.decoding = False
        self.hands_over = False
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

    @property
    def room(self) -> int:
        """Tokens that may be scheduled here before this group's shard is full."""
        return self.base + self.limit - self.scheduled

    @property
    def past(self) -> int:
        """Cached tokens that the next chunk's attention reads where it reads most: in the largest of its shards."""
        own = self.scheduled - self.base
        return max(own, *(shard.tokens for shard in self.shards)) if self.shards else own

    def facts(self, remaining_s: float) -> PrefillFacts:
        return PrefillFacts(self.request.arrival_s, self.deadline_s, self.total_s, remaining_s)
