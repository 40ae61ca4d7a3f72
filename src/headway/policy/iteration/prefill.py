"""State of one request in the iteration policy: cursor, deadline, predicted work, place in the queue."""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from headway.core.request import Request

WHOLE: Final = 1 << 62
"""The shard limit of a request whose KV lies in one group."""


class PrefillState:
    """One request on one engine instance, from its arrival to its end. Cursors are in tokens, times in seconds.

    Changed by `IterationPolicy`, except for the cursors of decoding requests, which the scheduler may keep here."""

    __slots__ = (
        "asked_again",
        "base",
        "deadline_s",
        "decoding",
        "generated",
        "holds_kv",
        "interrupted",
        "last_progress",
        "limit",
        "medha_size",
        "needed_blocks",
        "order",
        "prompt",
        "rank",
        "request",
        "scheduled",
        "skipped_since",
        "slot",
        "steps",
        "total_s",
        "work_s",
    )

    def __init__(self, request: Request, order: int) -> None:
        self.request = request
        # Order of arrival: breaks ties; the request with the largest is the youngest, evicted first.
        self.order = order
        # Steps of the ladder that it has climbed, and its size under Medha's rules.
        self.steps = self.medha_size = 0
        self.prompt = request.prompt_tokens
        # Output tokens, all of which are computed again when the KV is lost.
        self.generated = 0
        # Tokens that are computed or in flight.
        self.scheduled = request.cached_tokens
        self.holds_kv = False
        # First token of the shard in this group.
        self.base = 0
        # Most tokens of the shard in this group.
        self.limit = WHOLE
        self.decoding = False
        # Slot in the queue; negative: not in it. And its place in the queue's last order.
        self.slot, self.rank = -1, 0
        # The last iteration in which it got tokens.
        self.last_progress = 0
        # Tokens of its next chunk, which an arrival interrupted: some of its layers are computed. 0: there is none.
        self.interrupted = 0
        # When admission first failed for lack of KV, seconds; None: it has not.
        self.skipped_since: float | None = None
        # Blocks that it would take to enter, as the pool said last, and the decision in which the pool is asked again.
        self.needed_blocks = self.asked_again = 0
        # Isolated prefill time on arrival.
        self.total_s = 0.0
        # Part of `total_s` that is left.
        self.work_s = 0.0
        # When the first token is due.
        self.deadline_s = 0.0

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

    def set_cached(self, tokens: int) -> None:
        """Set how many tokens of the prompt are cached. Only for a request that holds no KV."""
        self.request = replace(self.request, cached_tokens=tokens)
        self.scheduled = tokens
