"""The plan stream of one group, at both ends: batches to deltas at the engine, deltas to batches at a rank. No torch.

Both ends fold every plan into two rolling checksums. One is of the plans, compared when a plan comes: it finds a plan
that was lost, doubled or damaged. The other is of the states that they led to (the ranges of blocks that the operations
gave, and the KV tokens that the decodes read), compared before the plan is computed: it finds allocators that diverge.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Mapping
from typing import Generic, TypeVar

import msgspec

from headway.core.batch import Chunk, DecodeGroup, GroupBatch, KvOp, KvVerb, RemoteAttention
from headway.kv.block_allocator import BlockTables, Run
from headway.runtime.executor.messages import BatchPlan

QueryTargets = tuple[tuple[int, tuple[str, ...]], ...]
"""(remote group, requests): rows of a part that other KV groups attend as well."""

ForeignTokens = tuple[tuple[str, int, tuple[int, ...]], ...]
"""(request, tokens known before, tokens): generated in other KV groups, for a group that takes the request over."""

Runs = list[tuple[Run, ...]]
"""For each block operation, in order: the ranges of blocks that the request then holds."""

_encoder = msgspec.msgpack.Encoder()

REMEMBERED_EPOCHS = 32
"""Decode groups that both ends remember. Few are alive (one a batch in flight, one that waits); a group that builds on
a forgotten one is sent in full."""


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

    def items(self) -> tuple[tuple[int, T], ...]:
        """All that are kept, oldest use first."""
        return tuple(self._groups.items())


class PlanWriter:
    """The engine's end of one group's stream. `numbers` maps the ids of live requests to their numbers."""

    def __init__(self, kv_blocks: int, numbers: Mapping[str, int]) -> None:
        self.seq = 0
        self.plans_checksum = self.state_checksum = 0
        self._numbers = numbers
        self._holders: dict[str, int] = {}
        self._last_stray = 0
        self._tables = BlockTables(kv_blocks)
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
        # `fold_plan` ignores both checksum fields, so the plan is folded before they are filled in.
        self.plans_checksum = fold_plan(self.plans_checksum, plan)
        self.state_checksum = fold_state(self.state_checksum, replay(self._tables, plan), part.decodes.kv_sum)
        return msgspec.structs.replace(plan, plans_checksum=self.plans_checksum, state_checksum=self.state_checksum)

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

    def _numbered(self, op: KvOp) -> tuple[int, int, int] | None:
        """Return an operation with the number of the blocks' owner, or None if ranks need not know of it.

        Numbers are remembered by owner because an id may be in use again before the blocks of its former request are
        freed. A request that ended before its blocks could be given, or was never submitted, gets a number below 0. A
        request that takes over blocks of another takes over their number too, so nothing changes at the ranks.
        """
        if op.verb == "reassign":
            self._holders[op.request] = self._holders.pop(op.before)
            return None
        if op.verb == "free":
            return self._holders.pop(op.request), 0, 0
        if op.verb == "reserve":
            if op.request not in self._numbers:
                # Negative numbers cannot collide with those of admitted requests, which count up from 1.
                self._last_stray -= 1
            self._holders[op.request] = self._numbers.get(op.request, self._last_stray)
        return self._holders[op.request], op.blocks, op.start


class StreamState:
    """The receiving end: a rank's state after the plans so far. Requests are their numbers as text.

    The engine has one too, advanced when a batch is committed: snapshots are made of it.
    """

    def __init__(self, tables: BlockTables, plans_checksum: int = 0, check: int = 0) -> None:
        self.plans_checksum = plans_checksum
        self.state_checksum = check
        self.tables = tables
        self.epochs: DecodeEpochs[tuple[str, ...]] = DecodeEpochs()

    def part_of(self, plan: BatchPlan) -> GroupBatch:
        """Return the plan as a batch's part. Called once for each plan, in order.

        Raises ValueError when it is not the plan that was written, KeyError when it builds on an unknown group.
        """
        self.plans_checksum = fold_plan(self.plans_checksum, plan)
        if self.plans_checksum != plan.plans_checksum:
            raise ValueError(f"its checksum is {plan.plans_checksum:08x}, and here {self.plans_checksum:08x}")
        members: tuple[str, ...] = ()
        if plan.epoch:
            members = self.epochs[plan.base] if plan.base else ()
            # Order is part of the state: members that stay keep theirs, new ones follow. Tokens are matched by this
            # order.
            if plan.epoch != plan.base:
                gone = {str(number) for number in plan.left}
                kept = tuple(name for name in members if name not in gone) if gone else members
                members = (*kept, *map(str, plan.joined))
            # Both ends use epochs in the same order, so both forget the same ones.
            self.epochs.use(plan.epoch, members)
        ops = tuple(KvOp(_verb(blocks, start), str(request), blocks, start) for request, blocks, start in plan.ops)
        chunks = tuple(Chunk(str(c[0]), c[1], c[2], c[3], c[4]) for c in plan.chunks)
        assists = tuple(RemoteAttention(str(request), *rest) for request, *rest in plan.assists)
        return GroupBatch(0, DecodeGroup(members, 0, plan.epoch), chunks, ops, assists)

    def advance(self, runs: Runs, kv_sum: int) -> int:
        """Fold into the checksum that a plan's operations gave `runs` and its decodes read `kv_sum` tokens."""
        self.state_checksum = fold_state(self.state_checksum, runs, kv_sum)
        return self.state_checksum


def replay(tables: BlockTables, plan: BatchPlan) -> Runs:
    """Carry out a plan's block operations and return what each request then holds."""
    results: list[tuple[Run, ...]] = []
    for number, blocks, _ in plan.ops:
        request = str(number)
        if blocks:
            tables.add(request, blocks)
            results.append(tables.runs(request))
        else:
            tables.free(request)
            results.append(())
    return results


def _verb(blocks: int, start: int) -> KvVerb:
    """Return the verb of an operation as received. Only a new shard has a `start`; "reserve" and "grow" add alike."""
    if not blocks:
        return "free"
    return "reserve" if start else "grow"


def fold_plan(before: int, plan: BatchPlan) -> int:
    """Return the rolling checksum of plans: CRC-32 of this one, seeded with the one before."""
    return zlib.crc32(_encoder.encode(msgspec.structs.replace(plan, plans_checksum=0, state_checksum=0)), before)


def fold_state(check: int, runs: Runs, kv_sum: int) -> int:
    """Return the rolling checksum of states: CRC-32 of the state after a plan, seeded with the one before."""
    return zlib.crc32(_encoder.encode((runs, kv_sum)), check)
