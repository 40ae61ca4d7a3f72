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

    The same `epoch` means the same `members` (in the same order), so that a plan need not repeat them.
    """

    members: tuple[str, ...] = ()
    kv_sum: int = 0
    epoch: int = 0

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
    """One iteration. `predicted_s` is the latency model's word for it; `repeat` identical decode iterations in one
    (a simulator's fast-forward; live always 1)."""

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
    (end token, length, stop): a finished request takes part in no later batch."""

    request: str
    accepted: int
    finished: bool
