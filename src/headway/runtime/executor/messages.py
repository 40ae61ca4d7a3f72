"""Messages between the engine and its ranks: msgspec arrays, never pickle. No torch.

In plans requests are numbers, assigned by the engine in order of admission: a plan never carries a client's id. A
`SubmitRequest` to a rank has its number as id, and is followed by the prompt only where the rank needs it.

Ranks of a cluster's instance also get the messages about spans and KV that their engine gets
(`runtime.engine.instance_protocol`), each to be taken behind all plans sent before it. `ComputeSpan` and `ResumeSpan`
are answered by `SpanTaskPaused`, `SpanTaskDone` or, at any time, `SpanTaskLost`; the engine waits for an answer of each
rank, for one request at a time. None grows with a context, except prompts, which come once, and slots by the number of
their ranges.
"""

from __future__ import annotations

import msgspec

from headway import __version__
from headway.core.sampling import TokenLogprobs
from headway.runtime.engine.instance_protocol import (
    ComputeSpan,
    KvArrived,
    MeetPeers,
    PauseRequest,
    ReserveKv,
    ResumeSpan,
    SendKv,
    SpanTaskDone,
    SpanTaskLost,
    SpanTaskPaused,
)
from headway.runtime.engine.protocol import AbortRequest, EndProcess, FatalError, SubmitRequest

PROTOCOL_VERSION = 8
"""Raised with every change of these messages; a rank of another number is refused."""

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

    protocol: int = PROTOCOL_VERSION
    version: str = __version__
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
    """A rank has carried out plan `seq`, or answers `RankQuery`."""

    seq: int
    """Of an answer: the last plan carried out."""
    start_s: float = 0.0
    """When computing began and ended, by CLOCK_MONOTONIC of the rank's host."""
    end_s: float = 0.0
    tokens: tuple[int, ...] = ()
    """The sampled tokens, decodes first, then finished prompts; only from the rank that samples."""
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    """One for each token; empty when no request asked for any."""
    measured_s: float | None = None
    """In answer to `RankQuery`: what was measured, else 0."""


class RankQuery(msgspec.Struct, frozen=True, array_like=True, tag="query"):
    """Measure an operation while there are no requests, or, after a silence, tell whether all plans have come."""

    kind: str
    """"plans" (the newest plan's number): answered behind what the rank computes; a rank that has not received it fails
    instead. Else what to measure, answered with the least seconds of the repeats: "chunk" (tokens, past), "decodes"
    (count, past), "forward" (rows), "product" (rows), "read" (MiB), or, by two ranks at the same time, "ask" (rows,
    remote group) and "visit" (rows, owner's group)."""
    first: int
    """The first of the numbers in brackets."""
    second: int = 0
    repeats: int = 1


SpanToRank = SubmitRequest | ComputeSpan | PauseRequest | ResumeSpan | AbortRequest
SpanFromRank = SpanTaskPaused | SpanTaskDone | SpanTaskLost
InstanceToRank = MeetPeers | ReserveKv | SendKv | SpanToRank
InstanceFromRank = ReserveKv | KvArrived | SpanFromRank
ToRank = RankWelcome | BatchPlan | RankQuery | EndProcess | InstanceToRank
FromRank = RankHello | FatalError | PlanDone | InstanceFromRank
