"""State of requests in the iteration policy and in a scheduler: prefills, decodes as a set, and the latency targets of
decodes.
"""

from __future__ import annotations

import heapq
from typing import Final

from msgspec.structs import replace
from typing_extensions import override

from headway.core.batch import DecodeGroup
from headway.core.request import Request
from headway.kv.block_manager import KvLease, KvShardLease

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


# State of one request in a scheduler: the policy's state, with lease, shards, chunks in flight and how it will end.
#
# There are no phases, only cursors: `scheduled` runs ahead of `computed` while chunks are in flight, and both chase
# `known` = prompt + generated. A prefill is a request with more than one token to go; a decode has one, and while it is
# in a `DecodeSet` its cursors are those of step `settled` of the set.


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

    @override
    def set_cached(self, tokens: int) -> None:
        super().set_cached(tokens)
        self.computed = tokens


# Sets of requests that decode together, with aggregates: a step costs O(1), whatever the number of members.
#
# A step of the set is one token of every member. Nothing is written per member: the set counts its steps, each member
# stores the step at which its cursors were last settled, and `settle` brings them up to date before they are read.


class DecodeSet:
    """Decoding requests in order of joining.

    The set travels with its batch and comes back whole, so that its epoch (and the tuple of members) stays the same
    while membership does. Cursors of a member are stale until `settle`; `kv_sum` is always up to date.
    """

    def __init__(self) -> None:
        self.members: dict[str, SequenceState] = {}
        # KV tokens that the next step reads, all members together, its own token included.
        self.kv_sum = 0
        self._steps = 0
        # Heap of (step at which the lease is full, id). Entries may be out of date, but never too late: leases only
        # grow.
        self._full: list[tuple[int, str]] = []
        # The group of the last batch, and changes of membership since.
        self._group = DecodeGroup()
        self._joined: dict[str, None] = {}
        self._left: list[str] = []

    def __len__(self) -> int:
        return len(self.members)

    def add(self, member: SequenceState) -> None:
        name = member.request.id
        self.members[name] = member
        # +1: the row's own token; the shard in this group begins at `base`.
        self.kv_sum += member.computed + 1 - member.base
        self._joined[name] = None
        member.settled = self._steps
        self.watch(member)

    def remove(self, member: SequenceState) -> None:
        name = member.request.id
        self.settle(member)
        del self.members[name]
        self.kv_sum -= member.computed + 1 - member.base
        if name in self._joined:
            # Joined since the last batch: executors have never seen it, so it did not leave either.
            del self._joined[name]
        else:
            self._left.append(name)

    def settle(self, member: SequenceState) -> None:
        """Bring a member's own cursors up to date."""
        steps = self._steps - member.settled
        if steps:
            member.computed += steps
            member.scheduled += steps
            member.generated += steps
            member.settled = self._steps

    def settle_all(self) -> None:
        for member in self.members.values():
            self.settle(member)

    def step(self, times: int = 1) -> None:
        """Advance every member by `times` tokens."""
        self._steps += times
        self.kv_sum += times * len(self.members)

    def watch(self, member: SequenceState) -> None:
        """Note the step at which a settled member will have filled its lease."""
        assert member.lease is not None
        room = member.lease.tokens + member.base - member.computed
        heapq.heappush(self._full, (self._steps + room, member.request.id))

    @property
    def needs_blocks(self) -> bool:
        """Whether a member has filled its lease. O(1) unless the first heap entry is due."""
        return bool(self._full) and self._full[0][0] <= self._steps and self.room() <= 0

    def room(self) -> int:
        """Return how many steps the members can take before a lease is full; 0: one is full now."""
        full, steps = self._full, self._steps
        while full:
            at, name = full[0]
            member = self.members.get(name)
            if member is not None and member.lease is not None:
                left = member.lease.tokens + member.base - member.computed - (steps - member.settled)
                # Else the lease has grown since the note, or the name is that of a later request: drop the note.
                if at == steps + left:
                    return left
            heapq.heappop(full)
        # No notes: the set is empty, so any bound holds.
        return 1 << 30

    def take_full(self) -> list[SequenceState]:
        """Return the members that need KV before their next step, settled.

        Call `watch` for each once its lease has grown."""
        taken = []
        while self.room() <= 0:
            member = self.members[heapq.heappop(self._full)[1]]
            self.settle(member)
            taken.append(member)
        return taken

    def group(self, epoch: int) -> DecodeGroup:
        """Return the group as a batch carries it.

        `epoch`: number of the group if membership has changed since the last."""
        last = self._group
        if self._joined or self._left:
            joined, left = tuple(self._joined), tuple(self._left)
            # Without departures the tuple is extended: order of joining is that of the dict.
            members = tuple(self.members) if left else last.members + joined
            self._joined, self._left = {}, []
            self._group = DecodeGroup(members, self.kv_sum, epoch, last.epoch, joined, left)
        # Same members: same epoch, and a delta of nothing.
        elif last.kv_sum != self.kv_sum or last.joined or last.left:
            self._group = DecodeGroup(last.members, self.kv_sum, last.epoch, last.epoch)
        return self._group
