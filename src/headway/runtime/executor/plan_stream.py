"""The plan stream of one group, at both ends: batches to deltas at the engine, deltas to batches at a rank. No torch.

Both ends fold every plan into two rolling checksums: of what was said, compared when a plan comes, and of what it led
to: the runs of blocks that its operations gave (the allocator) and the KV tokens that its decodes read (the cursors),
compared before it is computed. So a plan that was lost, doubled or damaged, or an allocator that went its own way, does
no harm.
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

Asks = tuple[tuple[int, tuple[str, ...]], ...]
"""(guest group, requests): whose rows of a part other groups attend as well."""

Told = tuple[tuple[str, int, tuple[int, ...]], ...]
"""(request, tokens known before, tokens): what was generated in other groups, for a group that takes over."""

Runs = list[tuple[Run, ...]]
"""Of each block operation, in order: what the request then holds."""

_encoder = msgspec.msgpack.Encoder()

KEPT_EPOCHS = 32
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
        """A plan has named this group. Epoch 0 is nobody and not kept."""
        if epoch:
            self._groups[epoch] = group
            self._groups.move_to_end(epoch)
            while len(self._groups) > KEPT_EPOCHS:
                self._groups.popitem(last=False)

    def items(self) -> tuple[tuple[int, T], ...]:
        """All that are kept, oldest use first."""
        return tuple(self._groups.items())


class PlanWriter:
    """The engine's end of one group's stream. `numbers` maps the ids of live requests to their numbers."""

    def __init__(self, kv_blocks: int, numbers: Mapping[str, int]) -> None:
        self.seq = 0
        self.said = self.check = 0
        self._numbers = numbers
        self._holders: dict[str, int] = {}
        self._strays = 0
        self._tables = BlockTables(kv_blocks)
        self._epochs: DecodeEpochs[dict[str, int]] = DecodeEpochs()
        self._forget: list[int] = []

    def forget(self, request: int) -> None:
        """Tell the ranks with the next plan that a request has ended."""
        self._forget.append(request)

    def holder(self, request: str) -> int | None:
        """The number under which blocks of a request are held, as far as was told; live or not."""
        return self._holders.get(request)

    def spare(self, request: int) -> None:
        """A number that was to be forgotten is in use again."""
        self._forget = [number for number in self._forget if number != request]

    def write(self, part: GroupBatch, asks: Asks = (), told: Told = ()) -> BatchPlan:
        """The next plan. It is part of the stream from here on, and must be sent."""
        numbers = self._numbers
        self.seq += 1
        epoch, base, joined, left = self._delta(part.decodes)
        plan = BatchPlan(
            seq=self.seq,
            forget=tuple(self._forget),
            ops=tuple(said for op in part.kv_ops if (said := self._numbered(op)) is not None),
            epoch=epoch,
            base=base,
            joined=joined,
            left=left,
            chunks=tuple((numbers[c.request], c.start, c.tokens, c.last, c.base) for c in part.prefills),
            assists=tuple((self._holders[a.request], a.rows, a.owner, a.start, a.tokens) for a in part.assists),
            asks=tuple((group, tuple(numbers[name] for name in names)) for group, names in asks),
            told=tuple((numbers[name], known, tokens) for name, known, tokens in told),
        )
        self._forget.clear()
        self.said = spoken(self.said, plan)
        self.check = fold(self.check, replay(self._tables, plan), part.decodes.kv_sum)
        return msgspec.structs.replace(plan, said=self.said, check=self.check)

    def _delta(self, group: DecodeGroup) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
        """(epoch, base, joined, left) as numbers. In full when the group's base is forgotten."""
        epoch, base, epochs = group.epoch, group.base, self._epochs
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
            base, members, left, names = 0, {}, (), group.members
        joined = tuple(self._numbers[name] for name in names)
        members.update(zip(names, joined, strict=True))
        epochs.use(epoch, members)
        return epoch, base, joined, left

    def _numbered(self, op: KvOp) -> tuple[int, int, int] | None:
        """An id may be in use again before the blocks of who had it before are freed. Who has ended before its blocks
        could be given, or was never submitted, has a number of its own, below 0. Who takes over the blocks of another
        has their number, of which ranks need not hear."""
        if op.verb == "rename":
            self._holders[op.request] = self._holders.pop(op.before)
            return None
        if op.verb == "free":
            return self._holders.pop(op.request), 0, 0
        if op.verb == "reserve":
            if op.request not in self._numbers:
                self._strays -= 1
            self._holders[op.request] = self._numbers.get(op.request, self._strays)
        return self._holders[op.request], op.blocks, op.start


class StreamState:
    """The receiving end: what a rank knows after the plans so far. The engine has one too, which follows the batches
    that are done: snapshots are made of it. Requests are their numbers as text."""

    def __init__(self, tables: BlockTables, said: int = 0, check: int = 0) -> None:
        self.said = said
        self.check = check
        self.tables = tables
        self.epochs: DecodeEpochs[tuple[str, ...]] = DecodeEpochs()

    def part_of(self, plan: BatchPlan) -> GroupBatch:
        """The plan as a batch's part. Called once a plan, in order. ValueError when it is not the one that was written,
        KeyError when it builds on an unknown group."""
        self.said = spoken(self.said, plan)
        if self.said != plan.said:
            raise ValueError(f"its checksum is {plan.said:08x}, and here {self.said:08x}")
        members: tuple[str, ...] = ()
        if plan.epoch:
            members = self.epochs[plan.base] if plan.base else ()
            if plan.epoch != plan.base:
                gone = {str(number) for number in plan.left}
                kept = tuple(name for name in members if name not in gone) if gone else members
                members = (*kept, *map(str, plan.joined))
            self.epochs.use(plan.epoch, members)
        ops = tuple(KvOp(_verb(blocks, start), str(request), blocks, start) for request, blocks, start in plan.ops)
        chunks = tuple(Chunk(str(c[0]), c[1], c[2], c[3], c[4]) for c in plan.chunks)
        assists = tuple(RemoteAttention(str(request), *rest) for request, *rest in plan.assists)
        return GroupBatch(0, DecodeGroup(members, 0, plan.epoch), chunks, ops, assists)

    def advance(self, runs: Runs, kv_sum: int) -> int:
        """A plan's block operations have given `runs`, and its decodes read `kv_sum` tokens: the checksum that results,
        which is kept."""
        self.check = fold(self.check, runs, kv_sum)
        return self.check


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
    """Of an operation as it comes: "reserve" and "grow" add blocks alike, but a new shard begins at `start`."""
    if not blocks:
        return "free"
    return "reserve" if start else "grow"


def spoken(said: int, plan: BatchPlan) -> int:
    """The rolling checksum of plans: CRC-32 of this one, begun at the one before."""
    return zlib.crc32(_encoder.encode(msgspec.structs.replace(plan, said=0, check=0)), said)


def fold(check: int, runs: Runs, kv_sum: int) -> int:
    """The rolling checksum of states: CRC-32 of what a plan led to, begun at the one before."""
    return zlib.crc32(_encoder.encode((runs, kv_sum)), check)
