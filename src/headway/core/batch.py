"""Contents of one iteration. Made by `InstanceScheduler.schedule`, carried out by an executor, live or simulated.

Batches are deltas: decoding requests are a group that changes rarely, and KV changes are the block manager's operations
since the previous batch, which an executor replays on its own block tables. Nothing here grows with context length.

An instance may have several *groups*, each with all weights and a KV pool of its own (KV parallelism, Medha §3.3). A
long request's KV is cut into shards, one a group: its rows are computed in the part of the group that holds the last
shard, and the others attend these rows over their shards (`RemoteAttention`).

Nothing here can be part of a cycle, so the collector need not look at it (`gc=False`).
"""

from __future__ import annotations

from typing import Literal

import msgspec

KvVerb = Literal["reserve", "grow", "free", "reassign", "share", "evict"]


class KvOp(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """One operation on a group's block tables, to be replayed in order."""

    verb: KvVerb
    request: str
    blocks: int
    """How many blocks the operation adds; 0 for "free", "reassign" and "evict"."""
    start: int = 0
    """Of "reserve": the first token of the request that this group holds, where its shard begins."""
    before: str = ""
    """Of "reassign": the owner whose blocks become those of `request`. No data moves; single-process instances only."""
    runs: tuple[tuple[int, int], ...] = ()
    """Ranges of blocks (first, count). Of "share": cached blocks with which the request's table begins. Of "free": its
    blocks that stay cached. Of "evict": cached blocks that become free."""


class DecodeGroup(msgspec.Struct, frozen=True, gc=False):
    """Requests that each compute one token.

    A group is the group of epoch `base` without `left`, and with `joined` at its end: executors that store groups by
    epoch do work for changes only.
    """

    members: tuple[str, ...] = ()
    kv_sum: int = 0
    """KV tokens that the members read together in this group."""
    epoch: int = 0
    """The same epoch means the same members in the same order, which a message then need not repeat."""
    base: int = 0
    """Epoch of the previous group; 0: the empty group."""
    joined: tuple[str, ...] = ()
    left: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        return len(self.members)


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """Tokens [start, start + tokens) of a request. A chunk never crosses the edge of a shard."""

    request: str
    start: int
    tokens: int
    last: bool
    """Whether the iteration yields the request's next token."""
    base: int = 0
    """First token that this group holds: it attends [base, start), and groups with earlier shards the tokens before."""


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
    """One group's part of a batch."""

    group: int
    decodes: DecodeGroup
    prefills: tuple[Chunk, ...] = ()
    kv_ops: tuple[KvOp, ...] = ()
    """Replayed in order on the group's own block tables, before anything is computed."""
    assists: tuple[RemoteAttention, ...] = ()
    """Rows of other groups to attend over this group's shards."""

    @property
    def tokens(self) -> int:
        """Rows of the group's forward pass."""
        return self.decodes.count + sum(chunk.tokens for chunk in self.prefills)


class Batch(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One iteration of all groups that take part in it."""

    id: int
    parts: tuple[GroupBatch, ...]
    predicted_s: float = 0.0
    """Predicted seconds of one pipeline stage, of the slowest part."""
    repeat: int = 1
    """Above 1, the batch may stand for up to so many iterations, which would be scheduled one after another as long as
    no request arrives, ends or aborts. For simulators only; live it is 1."""
    interruptible: bool = False
    """Whether an executor may stop between layers when a request has arrived: it holds one chunk, for which no client
    waits. Stopped, it has computed nothing (`InstanceScheduler.interrupted`); a later batch of the same chunk alone
    goes on with the next layer."""

    @property
    def tokens(self) -> int:
        """Rows of the forward passes."""
        return sum(part.tokens for part in self.parts)


class RequestProgress(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Output of one request in a completed batch."""

    request: str
    accepted: int
    """Tokens accepted; 1 for a request that goes on."""
    finished: bool
    """Whether the request has ended (end token, length, stop): it takes part in no later batch."""
