"""The requests that decode together, with their aggregates: what keeps a decision independent of how many they are.

A step of the set is one token of every member. Nothing is written per member: the set counts its steps, a member
remembers at which step its cursors were last settled, and whoever needs them settles it. So a step of 2,048 decodes
costs what a step of one does.
"""

from __future__ import annotations

import heapq

from headway.core.batch import DecodeGroup
from headway.policy.iteration.sequence import SequenceState


class DecodeSet:
    """Members in order of joining. The set travels with its batch and comes back whole, so that its epoch (and the
    tuple of members) stays the same while nobody joins or leaves.

    Cursors of a member are stale until `settle`; `kv_sum`, what the next step reads together, never is.
    """

    def __init__(self) -> None:
        self.members: dict[str, SequenceState] = {}
        self.kv_sum = 0
        self._steps = 0
        self._full: list[tuple[int, str]] = []
        self._group = DecodeGroup()
        self._joined: dict[str, None] = {}
        self._left: list[str] = []

    def __len__(self) -> int:
        return len(self.members)

    def add(self, member: SequenceState) -> None:
        name = member.request.id
        self.members[name] = member
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
        """Every member has computed a token and been given the next, `times` times."""
        self._steps += times
        self.kv_sum += times * len(self.members)

    def watch(self, member: SequenceState) -> None:
        """Note when a (settled) member will have filled its lease."""
        assert member.lease is not None
        room = member.lease.tokens + member.base - member.computed
        heapq.heappush(self._full, (self._steps + room, member.request.id))

    @property
    def needs_blocks(self) -> bool:
        """Whether a member has filled its lease. Mostly one look at the first note, which may be out of date but is
        never too late."""
        return bool(self._full) and self._full[0][0] <= self._steps and self.room() <= 0

    def room(self) -> int:
        """Steps that the members can take before one of them has filled its lease; 0: somebody has."""
        full, steps = self._full, self._steps
        while full:
            at, name = full[0]
            member = self.members.get(name)
            if member is not None and member.lease is not None:
                left = member.lease.tokens + member.base - member.computed - (steps - member.settled)
                if at == steps + left:
                    return left
            heapq.heappop(full)
        return 1 << 30

    def take_full(self) -> list[SequenceState]:
        """Members that need KV before their next step, settled. They stay members; `watch` them again once grown."""
        taken = []
        while self.room() <= 0:
            member = self.members[heapq.heappop(self._full)[1]]
            self.settle(member)
            taken.append(member)
        return taken

    def group(self, epoch: int) -> DecodeGroup:
        """The group as a batch carries it. `epoch` is the number to take if membership has changed since the last."""
        last = self._group
        if self._joined or self._left:
            joined, left = tuple(self._joined), tuple(self._left)
            members = tuple(self.members) if left else last.members + joined
            self._joined, self._left = {}, []
            self._group = DecodeGroup(members, self.kv_sum, epoch, last.epoch, joined, left)
        elif last.kv_sum != self.kv_sum or last.joined or last.left:
            self._group = DecodeGroup(last.members, self.kv_sum, last.epoch, last.epoch)
        return self._group
