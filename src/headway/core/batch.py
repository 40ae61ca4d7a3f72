"""What one iteration computes. Made by `Scheduler.schedule`, carried out by an executor, live or simulated.

Batches are deltas: who decodes is a group that changes rarely, and KV moves are the ledger's operations since the
batch before, which an executor replays on its own copy of the allocator. Nothing here grows with context length.
"""

from __future__ import annotations

from typing import Literal

import msgspec

KvVerb = Literal["reserve", "grow", "free"]


class KvOp(msgspec.Struct, frozen=True, array_like=True):
    """One operation on the block allocator, to be replayed in order: `blocks` is how many it adds (0 for free)."""

    verb: KvVerb
    request: str
    blocks: int


class DecodeGroup(msgspec.Struct, frozen=True):
    """Requests that each compute one token. `kv_sum` is the number of KV tokens that they read together.

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


class Chunk(msgspec.Struct, frozen=True):
    """Tokens [start, start + tokens) of a request. When `last`, the iteration yields the request's next token."""

    request: str
    start: int
    tokens: int
    last: bool


class Part(msgspec.Struct, frozen=True):
    """What one group of instances does in a batch."""

    group: tuple[int, ...]
    decodes: DecodeGroup
    prefills: tuple[Chunk, ...] = ()


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """One iteration. `predicted_s` is the latency model's word for it (for one pipeline stage).

    `repeat` above 1 is leave to fast-forward: so many iterations of this batch, whose decodes all go on, would be
    scheduled one after another as long as nothing arrives, ends or aborts. Only simulators ask for it; live it is 1.
    """

    id: int
    parts: tuple[Part, ...]
    kv_ops: tuple[KvOp, ...] = ()
    predicted_s: float = 0.0
    repeat: int = 1

    @property
    def tokens(self) -> int:
        """Rows of the forward pass."""
        return sum(part.decodes.count + sum(chunk.tokens for chunk in part.prefills) for part in self.parts)


class Progress(msgspec.Struct, frozen=True, array_like=True):
    """What an executor reports of a request that yielded output: how many tokens were accepted, and whether it ended
    (end token, length, stop): a finished request takes part in no later batch. One that goes on has accepted 1."""

    request: str
    accepted: int
    finished: bool
