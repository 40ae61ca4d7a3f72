"""The requests that decode together, with their aggregates: what keeps a decision independent of how many they are."""

from __future__ import annotations

from headway.core.batch import DecodeGroup
from headway.scheduling.sequence import Sequence


class DecodeSet:
    """Members in order of joining. The set travels with its batch and comes back whole, so that its epoch (and the
    tuple of members) stays the same while nobody joins or leaves."""

    def __init__(self) -> None:
        self.members: dict[str, Sequence] = {}
        self.kv_sum = 0
        self._snapshot: tuple[str, ...] | None = ()
        self._epoch = 0

    def __len__(self) -> int:
        return len(self.members)

    def add(self, member: Sequence) -> None:
        self.members[member.request.id] = member
        self.kv_sum += member.computed + 1
        self._snapshot = None

    def remove(self, member: Sequence) -> None:
        del self.members[member.request.id]
        self.kv_sum -= member.computed + 1
        self._snapshot = None

    def group(self, epoch: int) -> DecodeGroup:
        """The group as a batch carries it. `epoch` is the number to take if membership has changed since the last."""
        if self._snapshot is None:
            self._snapshot = tuple(self.members)
            self._epoch = epoch
        return DecodeGroup(self._snapshot, self.kv_sum, self._epoch)
