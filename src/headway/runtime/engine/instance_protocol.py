"""Messages between the controller and an instance, beside those of `runtime.engine.protocol`.

All travel on the engine's one socket; where the instance is several processes, the engine and its ranks use the same
messages among each other (`runtime.executor.messages`). Requests are identified by an id that the controller makes for
each attempt, so a late message about an attempt that was given up matches no request. Instances are identified by their
number in the cluster. Token positions count from the beginning of the prompt. `number`, where a message has it, is set
between an engine and its ranks only: the request's number in the plan stream, 0 if it has none.
"""

from __future__ import annotations

import msgspec

from headway.core.executor import EmittedToken
from headway.core.span import SpanTask as SpanTask
from headway.runtime.engine.protocol import OutputDelta, SubmitRequest
from headway.runtime.kv_transfer.peer import PeerAddress as PeerAddress


class MeetPeers(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """All instances that are there now, the receiver included. Sent whenever that changes.

    Connections to an incarnation that is not listed any more are closed, and waits on them end with PeerLostError.
    """

    peers: tuple[PeerAddress, ...]


class ComputeSpan(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag=True):
    """Compute a span task of a request together with the rest of its group. Sent to all instances of the group."""

    id: str
    index: int
    """Number of the task: of the span in the prompt, or of the token that a group decodes."""
    run: SpanTask
    drawn: tuple[int, ...] = ()
    """Tokens that end with the task's last one, as many as may be unknown here: those drawn by other instances since
    `SubmitRequest`."""
    before: tuple[SpanTask, ...] = ()
    """Tasks computed before this one, in order: the layout of the KV follows from them."""
    last: bool = False
    """Whether the prompt ends with this task: the group's first instance then draws a token."""
    beside: bool = False
    """Whether the scheduler's iterations continue between layers; otherwise they stop until the task ends or pauses."""
    home: int | None = None
    """Instance where a scheduler has left the KV of all tokens before the task, which owns it from now on; `before`
    describes it too."""
    preemptible: bool = False
    """Whether the task can be paused."""
    cached: bool = False
    """Whether `before`, one task of one instance of the group, is not computed: that instance has its tokens in its
    prefix cache."""
    cached_slots: tuple[tuple[int, int], ...] = ()
    """Where that instance's engine has found them, as (first, count): for its span executor, and for its ranks. They
    are other requests': copied."""


class PauseRequest(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Stop computing a request, to go on here later or elsewhere.

    A span task stops at the next layer edge of the piece that is being computed: sent to the group's first instance,
    and answered by all of the group with `SpanTaskPaused`, or with `SpanTaskDone` where the last layer had begun. A
    decode leaves the scheduler after the token under way: answered by a delta with `staged`, or by the last one
    where the request ends with that token.
    """

    id: str


class ResumeSpan(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Continue a paused span, or a rank's part in it that waits. Sent to all instances of the group."""

    id: str
    slots: tuple[tuple[int, int], ...] = ()
    """To a rank that needs slots of the pool: their ranges, as (first, count)."""


class ReserveKv(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Reserve blocks for the KV of an admitted request. Comes back when they are, in order of request, behind a stats
    snapshot that shows them as used."""

    id: str
    tokens: int
    serial: int = 0
    """An instance that a request has left may get another reservation of it."""
    number: int = 0


class SendKv(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag=True):
    """Send the KV of tokens [start, end) that is here, or will be after the task under way, to instance `to`.

    Layer by layer, as soon as each is computed. Only to an instance that has answered `ReserveKv`.
    """

    id: str
    piece: int
    """Number of the movement, which the receiver's `KvArrived` repeats."""
    start: int
    end: int
    to: int
    number: int = 0
    there: int = 0
    """To a rank: tokens that are there under that number, if any; it may know of more."""


class SpanTaskDone(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag=True):
    """A span task is complete on this instance. Times are CLOCK_MONOTONIC."""

    id: str
    index: int
    began_s: float = 0.0
    ended_s: float = 0.0
    cached_tokens: int = 0
    """Tokens before the task that came from a prefix cache (`ComputeSpan.cached`)."""
    saved_s: float = 0.0
    """Seconds that these would have taken alone, on this instance."""
    delta: OutputDelta | None = None
    """From the group's first instance after the last task: the token, with `finish` set where it ends the request."""
    # From a rank, in place of times and delta (`SpanExecutor.finish` and `whole_tokens`).
    emitted: EmittedToken | None = None
    moved: bool = False
    whole: int = 0


class SpanTaskPaused(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag=True):
    """A span task has stopped until `ResumeSpan`. Bytes are those that this instance keeps
    (`runtime.sequence_parallel.paused_state`)."""

    id: str
    index: int
    tokens: int = 0
    """Position before which all tokens are complete in all layers."""
    layer: int = 0
    """Number of layers that are complete of the piece after that position."""
    kv_bytes: int = 0
    activation_bytes: int = 0
    kv_bytes_at_end: int = 0
    """KV bytes of the whole task, once it is complete."""
    waits: bool = False
    """From a rank, which is not to pause: it waits for `slots` of the pool (`span_executor.SlotAllocator`), or, with a
    `layer`, carries out batches that the engine has submitted."""
    slots: int = 0
    replace: bool = False


class SpanTaskLost(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A task or a transfer cannot be completed here. The controller drops the attempt."""

    id: str
    why: str
    by: int | None = None
    """The instance to which the loss is attributed: one that cannot be reached from here, or this one, where something
    has failed; None: neither."""
    transfer: bool = False
    """From a rank, of which `by` names the end: it is a transfer (`connector.KvLost`)."""


class KvArrived(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A slice of KV has arrived completely. Sent by the receiver, once per sender."""

    id: str
    piece: int
    source: int
    """The instance that sent it."""
    # CLOCK_MONOTONIC of the first and the last byte.
    began_s: float
    ended_s: float
    whole: bool = False
    """From a rank: its part of all other slices has arrived too."""
    serial: int = 0
    """From a rank: of the `ReserveKv` whose blocks it has filled."""


ToInstance = MeetPeers | SubmitRequest | ComputeSpan | PauseRequest | ResumeSpan | ReserveKv | SendKv
FromInstance = SpanTaskDone | SpanTaskPaused | SpanTaskLost | ReserveKv | KvArrived
