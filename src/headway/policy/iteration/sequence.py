"""State of one request in a scheduler: the policy's state, with lease, shards, chunks in flight and how it will end.

There are no phases, only cursors: `scheduled` runs ahead of `computed` while chunks are in flight, and both chase
`known` = prompt + generated. A prefill is a request with more than one token to go; a decode has one, and while it is
in a `DecodeSet` its cursors are those of step `settled` of the set.
"""

from __future__ import annotations

from headway.core.request import Request
from headway.kv.block_manager import KvLease
from headway.kv.kv_shards import KvShardLease
from headway.policy.iteration.prefill import PrefillState


class SequenceState(PrefillState):
    """One request in the group that computes its rows. Owned and changed by that group's scheduler and its policy."""

    __slots__ = ("aborted", "computed", "in_flight", "lease", "leaves_staged", "settled", "shards", "started")

    def __init__(self, request: Request, order: int) -> None:
        super().__init__(request, order)
        # Tokens whose KV is in place.
        self.computed = request.cached_tokens
        self.lease: KvLease | None = None
        # Shards with the tokens before `base`, in other groups, in order.
        self.shards: tuple[KvShardLease, ...] = ()
        # Chunks that are scheduled and not completed.
        self.in_flight = 0
        # Step of the decode set at which the cursors were last brought up to date.
        self.settled = 0
        self.aborted = False
        self.started = False
        # Ends with its next token and leaves its KV staged.
        self.leaves_staged = False

    def set_cached(self, tokens: int) -> None:
        """See `PrefillState.set_cached`."""
        super().set_cached(tokens)
        self.computed = tokens
