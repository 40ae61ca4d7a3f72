"""What one iteration computes. Made by `Scheduler.schedule`, carried out by an executor, live or simulated.

Batches are deltas: who decodes is a group that changes rarely, and KV moves are a ledger's operations since the
batch before, which an executor replays on its own copy of the allocator. Nothing here grows with context length.

An instance may have several *groups*, each with all weights and a KV pool of its own (KV parallelism, Medha §3.3). A
long request's KV is cut into shards, one a group: its rows are computed in the part of the group that holds the last
shard, and the others attend these rows over their shards (`RemoteAttention`).

Nothing here can be part of a cycle, so the collector need not look at it (`gc=False`).
"""

from __future__ import annotations

from typing import Literal

import msgspec

KvVerb = Literal["reserve", "grow", "free", "reassign"]


class KvOp(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """One operation on a group's block allocator, to be replayed in order: `blocks` is how many it adds (0 for free).

    With "reserve", `start` is the first token of the request that this group holds: its shard begins there. "reassign"
    gives what `before` owns to `request`, and moves nothing; only an instance that is one process does it."""

    verb: KvVerb
    request: str
    blocks: int
    start: int = 0
    before: str = ""


class DecodeGroup(msgspec.Struct, frozen=True, gc=False):
    """Requests that each compute one token. `kv_sum` is the number of KV tokens that they read together in this group.

    The same `epoch` means the same `members` (in the same order), so that a plan need not repeat them. A new epoch is
    the group of epoch `base` (0: nobody) without `left`, and with `joined` at its end: executors that keep groups by
    epoch do work for what has changed only.
    """

    members: tuple[str, ...] = ()
    kv_sum: int = 0
    epoch: int = 0
    base: int = 0
    joined: tuple[str, ...] = ()
    left: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        return len(self.members)


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """Tokens [start, start + tokens) of a request. When `last`, the iteration yields the request's next token.

    `base` is the first token that this group holds: of what went before, it reads [base, start), others the rest. A
    chunk never crosses the edge of a shard."""

    request: str
    start: int
    tokens: int
    last: bool
    base: int = 0


class RemoteAttention(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Rows of a request that group `owner` computes in this batch (a decode: 1, a chunk: its tokens), to be attended
    over this group's whole shard: tokens [start, start + tokens) of the request, all before the rows, so without mask.
    The partial (out, lse) goes to the owner, layer by layer."""

    request: str
    rows: int
    owner: int
    start: int
    tokens: int


class GroupBatch(msgspec.Struct, frozen=True, gc=False):
    """What one group does in a batch. `kv_ops` come first, in order, on the group's own block tables."""

    group: int
    decodes: DecodeGroup
    prefills: tuple[Chunk, ...] = ()
    kv_ops: tuple[KvOp, ...] = ()
    assists: tuple[RemoteAttention, ...] = ()

    @property
    def tokens(self) -> int:
        """Rows of the group's forward pass."""
        return self.decodes.count + sum(chunk.tokens for chunk in self.prefills)


class Batch(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One iteration, of all groups that have a part in it. `predicted_s` is the latency model's word for it (for one
    pipeline stage, the slowest part).

    `repeat` above 1 is leave to fast-forward: so many iterations of this batch, whose decodes all go on, would be
    scheduled one after another as long as nothing arrives, ends or aborts. Only simulators ask for it; live it is 1.
    """

    id: int
    parts: tuple[GroupBatch, ...]
    predicted_s: float = 0.0
    repeat: int = 1

    @property
    def tokens(self) -> int:
        """Rows of the forward passes."""
        return sum(part.tokens for part in self.parts)


class RequestProgress(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """What an executor reports of a request that yielded output: how many tokens were accepted, and whether it ended
    (end token, length, stop): a finished request takes part in no later batch. One that goes on has accepted 1."""

    request: str
    accepted: int
    finished: bool
