"""What the engine and its ranks say to each other: plans of batches as deltas, messages, a rank's settings and its
place in the layout. No torch.

Connections keep messages whole and in order; plans are numbered, so that one lost with a broken connection
is noticed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from headway import __version__
from headway.core.batch import Chunk, DecodeGroup, GroupBatch, KvOp, KvVerb, RemoteAttention
from headway.core.errors import InvariantError, LostError
from headway.core.request import TokenLogprobs
from headway.perf.hardware import ParallelLayout
from headway.runtime.engine.config import EngineConfig, InstanceConfig
from headway.runtime.engine.protocol import (
    AbortRequest,
    ComputeSpan,
    EndProcess,
    FatalError,
    KvArrived,
    MeetPeers,
    PauseRequest,
    ReserveKv,
    ResumeSpan,
    SendKv,
    SpanTaskDone,
    SpanTaskLost,
    SpanTaskPaused,
    SubmitRequest,
)
from headway.runtime.model.config import ModelShard

# Messages between the engine and its ranks: msgspec arrays, never pickle. No torch.
#
# In plans requests are numbers, assigned by the engine in order of admission: a plan never carries a client's id. A
# `SubmitRequest` to a rank has its number as id, and is followed by the prompt only where the rank needs it.
#
# Ranks of a cluster's instance also get the messages about spans and KV that their engine gets
# (`runtime.engine.protocol`), each to be taken behind all plans sent before it. `ComputeSpan` and `ResumeSpan`
# are answered by `SpanTaskPaused`, `SpanTaskDone` or, at any time, `SpanTaskLost`; the engine waits for an answer of
# each rank, for one request at a time. None grows with a context, except prompts, which come once, and slots by the
# number of their ranges.

HEARTBEAT_IDENTITY = b"beat-"
"""Prefix of the identity of a rank's connection for heartbeats; the rank's number follows."""

CONTROL_IDENTITY = b"control-"
"""Prefix of the identity of its connection for messages that do not wait for what it computes."""


class LoadedRank(msgspec.Struct, frozen=True, array_like=True):
    """A rank's weights and its KV pool."""

    mark: str
    """The checkpoint's fingerprint, which all ranks must share."""
    dtype: str
    threads: int
    weights_bytes: int
    kv_bytes: int
    peer_address: str | None = None
    """Where other instances reach this rank, if KV moves."""


class RankHello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """A rank's first message, and, with what it has `loaded`, its answer to `RankWelcome`."""

    version: str = __version__
    """A rank of another version is refused."""
    store_port: int = 0
    """The port of the rendezvous store, from rank 0 of several hosts; else 0."""
    loaded: LoadedRank | None = None


class RankWelcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """All ranks have connected: join the others at the store, and load the model."""

    store_port: int


class BatchPlan(msgspec.Struct, frozen=True, array_like=True, tag="p"):
    """One batch for one group: the changes since the plan before. Its size does not grow with a context's length.

    The decodes are group `epoch`: group `base` without `left` and with `joined` at its end.
    """

    seq: int
    forget: tuple[int, ...]
    """Requests that have ended."""
    ops: tuple[tuple[int, int, int, tuple[tuple[int, int], ...]], ...]
    """KV operations in order: (request, blocks, first token held here, ranges of blocks). With ranges a request begins
    with these cached blocks; 0 blocks: it frees all but the ranges, and request 0 frees cached ranges."""
    epoch: int
    """0: no decodes."""
    base: int
    joined: tuple[int, ...]
    left: tuple[int, ...]
    chunks: tuple[tuple[int, int, int, bool, int], ...]
    """Prefills: (request, start, tokens, last, first token held here)."""
    assists: tuple[tuple[int, int, int, int, int], ...] = ()
    """Rows of other KV groups to attend here: the fields of `core.batch.RemoteAttention`."""
    query_targets: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """(remote group, requests): their rows are attended there too, in the order of that group's `assists`."""
    foreign_tokens: tuple[tuple[int, int, tuple[int, ...]], ...] = ()
    """(request, tokens known before, tokens): generated in other groups, for requests that this group begins to hold.
    Tokens that it has already are skipped."""


class PlanDone(msgspec.Struct, frozen=True, array_like=True, tag="d"):
    """A rank has carried out plan `seq`."""

    seq: int
    start_s: float = 0.0
    """When computing began and ended, by CLOCK_MONOTONIC of the rank's host."""
    end_s: float = 0.0
    tokens: tuple[int, ...] = ()
    """The sampled tokens, decodes first, then finished prompts; only from the rank that samples."""
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    """One for each token; empty when no request asked for any."""


class MeasuredSeconds(msgspec.Struct, frozen=True, array_like=True, tag="m"):
    """A rank's answer to `MeasureRank`: the least seconds of the repeats."""

    seconds: float


class MeasureRank(msgspec.Struct, frozen=True, array_like=True, tag="measure"):
    """Measure an operation, while there are no requests."""

    kind: str
    """What to measure: "chunk" (tokens, past), "decodes" (count, past), "forward" (rows), "product" (rows), "read"
    (MiB), or, by two ranks at the same time, "ask" (rows, remote group) and "visit" (rows, owner's group)."""
    first: int
    """The first of the numbers in brackets."""
    second: int = 0
    repeats: int = 1


SpanToRank = SubmitRequest | ComputeSpan | PauseRequest | ResumeSpan | AbortRequest
SpanFromRank = SpanTaskPaused | SpanTaskDone | SpanTaskLost
InstanceToRank = MeetPeers | ReserveKv | SendKv | SpanToRank
InstanceFromRank = ReserveKv | KvArrived | SpanFromRank
ToRank = RankWelcome | BatchPlan | MeasureRank | EndProcess | InstanceToRank
FromRank = RankHello | FatalError | PlanDone | MeasuredSeconds | InstanceFromRank


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


# Settings with which a rank's process is started. No torch.


class RankConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that are the same for all ranks of a host: the engine's, and what is decided before ranks start."""

    engine: EngineConfig
    """Its threads and its attention backend are those of one rank."""
    kv_blocks: int
    """KV blocks of each KV group."""
    eos: tuple[int, ...] = ()
    cuda: int | None = None
    """The CUDA device of the host's first rank; the others have those that follow. None: the CPU."""
    host: str = "127.0.0.1"
    """Address of node 0, which has the rendezvous store."""
    token: str | None = None
    """Authenticates to the engine's socket where that can be reached from other hosts."""
    patience_s: float = 300.0
    """How long ranks wait for each other in a collective. The engine notices a rank that is gone much sooner."""
    timeout_s: float = 10.0
    """A rank without heartbeats for so long is lost."""
    start_timeout_s: float = 120.0
    """Likewise while the rank loads the model."""

    def device(self, rank: int) -> str:
        """Return a rank's device, as torch names it. Hosts have equally many ranks, in order."""
        each = self.engine.layout.accelerators // self.engine.nnodes
        return "cpu" if self.cuda is None else f"cuda:{self.cuda + rank % each}"

    @property
    def peer(self) -> InstanceConfig | None:
        """How the ranks exchange KV with other instances, if on CPUs; None unless they are cut by heads only.

        Such an instance is lost as a whole when one rank is (`runtime.cluster.instances`), because KV of other
        instances' requests was on it.
        """
        layout = self.engine.layout
        return self.engine.instance if layout.accelerators == layout.tp else None


# Ranks of an instance: T tensor-parallel ranks make a stage, S stages a group, K groups (KV parallelism) the instance.
#
# Rank numbers run through tensor parallelism first, which talks most, then stages, then groups. No torch.


@dataclass(frozen=True, slots=True)
class RankPosition:
    """One rank's place in a layout."""

    layout: ParallelLayout
    group: int
    stage: int
    tp: int

    @property
    def rank(self) -> int:
        return (self.group * self.layout.stages + self.stage) * self.layout.tp + self.tp

    @property
    def shard(self) -> ModelShard:
        """The part of the model that this rank holds. All groups hold the same parts."""
        return ModelShard(self.tp, self.layout.tp, self.stage, self.layout.stages)

    @property
    def draws(self) -> bool:
        """Whether this rank samples: the first of the last stage."""
        return self.stage == self.layout.stages - 1 and self.tp == 0

    @property
    def embeds(self) -> bool:
        """Whether this rank embeds tokens, and so needs their ids."""
        return self.stage == 0

    @property
    def drawer(self) -> RankPosition:
        """The rank of this group that samples."""
        return RankPosition(self.layout, self.group, self.layout.stages - 1, 0)

    @property
    def readers(self) -> tuple[RankPosition, ...]:
        """The ranks of this group that need the ids of sampled tokens."""
        ranks = (RankPosition(self.layout, self.group, 0, tp) for tp in range(self.layout.tp))
        return tuple(place for place in ranks if not place.draws)

    @property
    def stage_ranks(self) -> tuple[int, ...]:
        """All ranks of this stage of this group, in order."""
        return tuple(RankPosition(self.layout, self.group, self.stage, tp).rank for tp in range(self.layout.tp))

    def in_group(self, group: int) -> RankPosition:
        """Return the rank with the same slice of the same stage in another group."""
        return RankPosition(self.layout, group, self.stage, self.tp)

    def at_stage(self, stage: int) -> RankPosition:
        """Return the rank with the same slice in another stage."""
        return RankPosition(self.layout, self.group, stage, self.tp)


def place_of(layout: ParallelLayout, rank: int) -> RankPosition:
    """Return the position of a rank number."""
    row, tp = divmod(rank, layout.tp)
    return RankPosition(layout, *divmod(row, layout.stages), tp)


def places(layout: ParallelLayout) -> tuple[RankPosition, ...]:
    """Return the positions of all ranks, in order."""
    return tuple(place_of(layout, rank) for rank in range(layout.accelerators))


# Interface of message transport between the engine and its ranks.
#
# Live: ZeroMQ to processes (`runtime.executor.multi_process`); in tests: queues to threads.

Frame = bytes | memoryview


class RankLostError(LostError):
    """A rank's process has ended, is silent, or has reported that it cannot go on."""

    def __init__(self, rank: int, why: str) -> None:
        super().__init__(f"worker {rank} {why}")
        self.rank = rank
