"""The contents of one iteration, the protocol of the executor that carries it out, and the protocol of clocks.

Made by `InstanceScheduler.schedule`, carried out by an executor, live or simulated.

Batches are deltas: decoding requests are a group that changes rarely, and KV changes are the block manager's operations
since the previous batch, which an executor replays on its own block tables. Nothing here grows with context length.

An instance may have several *groups*, each with all weights and a KV pool of its own (KV parallelism, Medha §3.3). A
long request's KV is cut into shards, one a group: its rows are computed in the part of the group that holds the last
shard, and the others attend these rows over their shards (`RemoteAttention`).

Nothing here can be part of a cycle, so the collector need not look at it (`gc=False`).
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Protocol

import msgspec

from headway.core.request import SamplingParams, TokenLogprobs

KvVerb = Literal["reserve", "grow", "free", "reassign", "share", "evict"]


class KvOp(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """One operation on a group's block tables, to be replayed in order."""

    verb: KvVerb
    request: str
    blocks: int
    """How many blocks the operation adds; 0 for "free", "reassign" and "evict"."""
    start: int = 0
    """For "reserve": the first token of the request that this group holds, where its shard begins."""
    before: str = ""
    """For "reassign": the owner whose blocks become those of `request`. No data moves; only in one process."""
    runs: tuple[tuple[int, int], ...] = ()
    """Ranges of blocks (first, count). For "share": cached blocks with which the request's table begins. For "free":
    its blocks that stay cached. For "evict": cached blocks that become free."""


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


# Protocol between the engine's loop, which decides, and the executor, which runs the model.
#
# Batches carry deltas only. A prompt is passed once (`admit`); after that an executor identifies a request by its id,
# stores its tokens, and replays the KV operations of each batch on its own copy of the block tables. Called by the
# engine only, not by policies or servers. Test double: `tests/engine/fake_executor.py`. The simulator has its own.


class EmittedToken(NamedTuple):
    """The token that an iteration drew for a request."""

    request: str
    token: int
    logprobs: TokenLogprobs | None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    """Log-probabilities of the prompt from its second token on: sent with the first token, if they were asked for."""


class StepResult(NamedTuple):
    """Result of a completed batch."""

    batch_id: int
    emitted: list[EmittedToken]
    """One entry for each decode and each finished prompt."""
    elapsed_s: float
    """Measured seconds, of several stages or groups the slowest."""
    stages: tuple[tuple[tuple[float, float], ...], ...] = ()
    """For each part of the batch: begin and end on each pipeline stage, seconds of CLOCK_MONOTONIC of the stage's
    host. Empty: not measured."""


class Executor(Protocol):
    """Carries out batches in the order in which they are submitted."""

    @property
    def waits_on(self) -> tuple[Any, ...]:
        """What a `zmq.Poller` may wait on while batches are in flight: `result` may then have something. Empty for an
        executor that computes in `submit`."""

    @property
    def accepts(self) -> bool:
        """Whether the next batch would begin at once (stage 0 is free).

        An earlier one could not include new requests."""

    @property
    def free(self) -> tuple[int, ...] | None:
        """Of several KV groups, those whose first stage would begin a batch at once. None: all."""

    def admit(
        self,
        request_id: str,
        prompt: memoryview,
        params: SamplingParams,
        output: tuple[int, ...] = (),
        kept: bool = False,
    ) -> None:
        """Register a request before its first batch: prompt (int32, little-endian, validated) and sampling settings.

        `output`: tokens that it has generated elsewhere; batches count them as known. `kept`: KV stored here under its
        id becomes its own."""

    def submit(self, batch: Batch) -> None:
        """Begin a batch. Requests that its KV operations free and that are `forget`-ed need no further care."""

    def result(self, timeout_s: float | None) -> StepResult | None:
        """The next finished batch, in order; None when none finished within `timeout_s`. Raises LostError until
        `recover`, whether batches are in flight or not; no other method does."""

    def recover(self) -> None:
        """After a LostError: begin again, without KV and with nothing in flight. Live requests stay admitted, with what
        they have generated. Until `accepts`, calls of `result` carry the restart on; it may be lost again."""

    def forget(self, request_id: str) -> None:
        """The request has ended; its tokens may be dropped once batches in flight are done."""

    def close(self) -> None:
        """Free everything. Called once."""


# Protocol of clocks. Functions take times as arguments; a component that must read one takes a `ClockProtocol`.
#
# Only the live engine and the server hold a real clock. Policies, block managers and latency models never do.


class ClockProtocol(Protocol):
    """Seconds on an absolute, monotonic axis."""

    def now(self) -> float:
        """The current time in seconds. Never falls."""


class ManualClock:
    """Clock that `advance` moves: for tests and the simulator."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Move forward; raises ValueError on a negative step."""
        if seconds < 0:
            raise ValueError(f"a clock cannot go back by {-seconds} s")
        self._now += seconds
