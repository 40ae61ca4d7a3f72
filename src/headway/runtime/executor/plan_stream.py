"""The plan stream of one group, at both ends: batches to deltas at the engine, deltas to batches at a rank. No torch.

Connections keep messages whole and in order; plans are numbered, so that one lost with a broken connection is noticed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Generic, TypeVar

from headway.core.batch import Chunk, DecodeGroup, GroupBatch, KvOp, KvVerb, RemoteAttention
from headway.core.errors import InvariantError
from headway.runtime.executor.messages import BatchPlan

QueryTargets = tuple[tuple[int, tuple[str, ...]], ...]
"""(remote group, requests): rows of a part that other KV groups attend as well."""

ForeignTokens = tuple[tuple[str, int, tuple[int, ...]], ...]
"""(request, tokens known before, tokens): generated in other KV groups, for a group that takes the request over."""

REMEMBERED_EPOCHS = 32
"""Decode groups that both ends remember. Few are alive (one a batch in flight, one that waits); a group that builds on
a forgotten one is sent in full."""


_NumberedOp = tuple[int, int, int, tuple[tuple[int, int], ...]]
_CACHE = 0
"""Stands for the prefix cache where requests have numbers."""

T = TypeVar("T")


class DecodeEpochs(Generic[T]):
    """Decode groups by epoch, the least recently used forgotten first. Equal plans leave equal epochs."""

    def __init__(self) -> None:
        self._groups: OrderedDict[int, T] = OrderedDict()

    def __contains__(self, epoch: int) -> bool:
        return epoch in self._groups

    def __getitem__(self, epoch: int) -> T:
        """Raises KeyError for one that was never here or is forgotten."""
        return self._groups[epoch]

    def use(self, epoch: int, group: T) -> None:
        """Remember a group that a plan names. Epoch 0, the empty group, is not kept."""
        if epoch:
            self._groups[epoch] = group
            self._groups.move_to_end(epoch)
            while len(self._groups) > REMEMBERED_EPOCHS:
                self._groups.popitem(last=False)


class PlanWriter:
    """The engine's end of one group's stream. `numbers` maps the ids of live requests to their numbers."""

    def __init__(self, numbers: Mapping[str, int]) -> None:
        self.seq = 0
        self._numbers = numbers
        self._holders: dict[str, int] = {}
        self._last_stray = 0
        # The request that has begun with cached blocks, until its own ones follow.
        self._sharing: str | None = None
        self._epochs: DecodeEpochs[dict[str, int]] = DecodeEpochs()
        self._forget: list[int] = []

    def forget(self, request: int) -> None:
        """Announce with the next plan that a request has ended."""
        self._forget.append(request)

    def holder_number(self, request: str) -> int | None:
        """Return the number that owns a request's blocks as of the last plan, whether or not the request is live."""
        return self._holders.get(request)

    def keep_number(self, request: int) -> None:
        """Cancel a `forget` that was not sent: the number is in use again."""
        self._forget = [number for number in self._forget if number != request]

    def write(
        self, part: GroupBatch, query_targets: QueryTargets = (), foreign_tokens: ForeignTokens = ()
    ) -> BatchPlan:
        """Return the next plan. It is part of the stream from here on, and must be sent."""
        numbers = self._numbers
        self.seq += 1
        epoch, base, joined, left = self._delta(part.decodes)
        plan = BatchPlan(
            seq=self.seq,
            forget=tuple(self._forget),
            ops=tuple(numbered for op in part.kv_ops if (numbered := self._numbered(op)) is not None),
            epoch=epoch,
            base=base,
            joined=joined,
            left=left,
            chunks=tuple((numbers[c.request], c.start, c.tokens, c.last, c.base) for c in part.prefills),
            assists=tuple((self._holders[a.request], a.rows, a.owner, a.start, a.tokens) for a in part.assists),
            query_targets=tuple((group, tuple(numbers[name] for name in names)) for group, names in query_targets),
            foreign_tokens=tuple((numbers[name], known, tokens) for name, known, tokens in foreign_tokens),
        )
        self._forget.clear()
        return plan

    def _delta(self, group: DecodeGroup) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
        """(epoch, base, joined, left) as numbers. In full when the group's base is forgotten."""
        epoch, base, epochs = group.epoch, group.base, self._epochs
        # An unchanged group: base equals epoch, and no member is listed.
        if epoch in epochs:
            epochs.use(epoch, epochs[epoch])
            return epoch, epoch, (), ()
        if not (group.members or group.left):
            return 0, 0, (), ()
        if base in epochs:
            members = dict(epochs[base])
            left = tuple(members.pop(name) for name in group.left)
            names = group.joined
        else:
            # The base is unknown or forgotten: base 0, the empty group, makes `joined` the whole group.
            base, members, left, names = 0, {}, (), group.members
        joined = tuple(self._numbers[name] for name in names)
        members.update(zip(names, joined, strict=True))
        epochs.use(epoch, members)
        return epoch, base, joined, left

    def _numbered(self, op: KvOp) -> _NumberedOp | None:
        """Return an operation with the number of the blocks' owner, or None if ranks need not know of it.

        Numbers are remembered by owner because an id may be in use again before the blocks of its former request are
        freed. A request that ended before its blocks could be given, or was never submitted, gets a number below 0. A
        request that takes over blocks of another takes over their number too, so nothing changes at the ranks.
        """
        if op.verb == "reassign":
            self._holders[op.request] = self._holders.pop(op.before)
            return None
        if op.verb == "evict":
            return (_CACHE, 0, 0, op.runs) if op.runs else None
        if op.verb == "free":
            return self._holders.pop(op.request), 0, 0, op.runs
        # A request with cached blocks has its number from "share", which comes just before "reserve".
        begins = op.verb == "share" or (op.verb == "reserve" and op.request != self._sharing)
        self._sharing = op.request if op.verb == "share" else None
        if begins:
            if op.request not in self._numbers:
                # Negative numbers cannot collide with those of admitted requests, which count up from 1.
                self._last_stray -= 1
            self._holders[op.request] = self._numbers.get(op.request, self._last_stray)
        return (self._holders[op.request], op.blocks, op.start, op.runs) if op.blocks else None


class PlanReader:
    """A rank's end: requests are their numbers as text."""

    def __init__(self) -> None:
        self.seq = 0
        """The last plan that has come."""
        self._epochs: DecodeEpochs[tuple[str, ...]] = DecodeEpochs()

    def part_of(self, plan: BatchPlan) -> GroupBatch:
        """Return the plan as a batch's part. Raises InvariantError when it does not follow the last one."""
        if plan.seq != self.seq + 1:
            raise InvariantError(f"plan {plan.seq} came after plan {self.seq}")
        self.seq = plan.seq
        members: tuple[str, ...] = ()
        if plan.epoch:
            members = self._epochs[plan.base] if plan.base else ()
            # Order is part of the state: members that stay keep theirs, new ones follow. Tokens are matched by this
            # order.
            if plan.epoch != plan.base:
                gone = {str(number) for number in plan.left}
                kept = tuple(name for name in members if name not in gone) if gone else members
                members = (*kept, *map(str, plan.joined))
            # Both ends use epochs in the same order, so both forget the same ones.
            self._epochs.use(plan.epoch, members)
        ops = tuple(
            KvOp(_verb(request, blocks, start, runs), str(request), blocks, start, runs=runs)
            for request, blocks, start, runs in plan.ops
        )
        chunks = tuple(Chunk(str(c[0]), c[1], c[2], c[3], c[4]) for c in plan.chunks)
        assists = tuple(RemoteAttention(str(request), *rest) for request, *rest in plan.assists)
        return GroupBatch(0, DecodeGroup(members, 0, plan.epoch), chunks, ops, assists)


def _verb(request: int, blocks: int, start: int, runs: tuple[tuple[int, int], ...]) -> KvVerb:
    """Return the verb of an operation as received. Only a new shard has a `start`; "reserve" and "grow" add alike."""
    if not blocks:
        return "free" if request else "evict"
    if runs:
        return "share"
    return "reserve" if start else "grow"
