"""Messages about span tasks between an engine and its ranks, besides those of `kv_transfer.rank_notes`.

They are the bodies of `runtime.executor.messages.ControlMessage` and `ControlReply`. Each concerns one request, by its
name. The engine sends a message to all ranks and waits for an answer of each, for one request at a time. A prompt is
sent once; no other message grows with a context, except slots by the number of their ranges.
"""

from __future__ import annotations

import msgspec

from headway.core.executor import EmittedToken
from headway.core.sampling import SamplingParams
from headway.core.span import SpanTask
from headway.runtime.kv_transfer import rank_notes


class AdmitSpan(msgspec.Struct, frozen=True, array_like=True, tag="keep"):
    """A request of which spans may be computed (`SpanExecutor.admit`). prompt: token ids, int32, little-endian."""

    name: str
    prompt: bytes
    params: SamplingParams
    output: tuple[int, ...]


class BeginSpan(msgspec.Struct, frozen=True, array_like=True, tag="begin"):
    """Prepare a span task (`SpanExecutor.begin`). Answered by any number of `WantSlots`, then `SpanBegun`."""

    name: str
    run: SpanTask
    before: tuple[SpanTask, ...]
    preemptible: bool
    drawn: tuple[int, ...]


class GrantSlots(msgspec.Struct, frozen=True, array_like=True, tag="given"):
    """Slot ranges of the pool, in answer to `WantSlots`."""

    name: str
    slots: tuple[tuple[int, int], ...]


class StartSpan(msgspec.Struct, frozen=True, array_like=True, tag="go"):
    """Compute the span from where it stands. Answered by `LayerEdge`, then by `SpanComputed` or `SpanHalted`."""

    name: str
    hold: bool
    """Pause it at once."""
    edges: bool
    """Stop behind each layer, for batches that the engine has submitted, until `ContinueSpan`."""


class HoldSpan(msgspec.Struct, frozen=True, array_like=True, tag="hold"):
    """Pause at the next layer edge. Only the first rank of the task's group acts on it."""

    name: str


class ContinueSpan(msgspec.Struct, frozen=True, array_like=True, tag="on"):
    """Go on behind an `LayerEdge`."""

    name: str


class FinishSpan(msgspec.Struct, frozen=True, array_like=True, tag="finish"):
    """See `SpanExecutor.finish`. Answered by `SpanEnded`."""

    name: str
    draw: bool


class SuspendRequest(msgspec.Struct, frozen=True, array_like=True, tag="cease"):
    """Cancel a request's span tasks, also the current one. Transfers of its KV continue."""

    name: str
    number: int
    """The request's number at the ranks, where the blocks have become its own; `NOBODY` where they have not."""


class WantSlots(msgspec.Struct, frozen=True, array_like=True, tag="want"):
    """Request slots of the pool (`span_executor.SlotAllocator`)."""

    name: str
    tokens: int
    replace: bool


class SpanBegun(msgspec.Struct, frozen=True, array_like=True, tag="begun"):
    """The span task is prepared."""

    name: str


class LayerEdge(msgspec.Struct, frozen=True, array_like=True, tag="edge"):
    """Reports how many layers of the current chunk are done, and waits for `ContinueSpan`."""

    name: str
    layers: int


class SpanHalted(msgspec.Struct, frozen=True, array_like=True, tag="halted"):
    """The span task is paused (`SpanExecutor.saved`). Bytes are this rank's."""

    name: str
    tokens: int
    layer: int
    kv_bytes: int
    activation_bytes: int
    kv_bytes_at_end: int


class SpanComputed(msgspec.Struct, frozen=True, array_like=True, tag="through"):
    """All layers of the span task are done."""

    name: str


class SpanEnded(msgspec.Struct, frozen=True, array_like=True, tag="ended"):
    """A span is done (`SpanExecutor.finish`)."""

    name: str
    emitted: EmittedToken | None
    moved: bool
    whole: int
    """See `SpanExecutor.whole_tokens`."""


class SpanBroken(msgspec.Struct, frozen=True, array_like=True, tag="broken"):
    """The span cannot be completed here."""

    name: str
    why: str
    end: int | None
    """The lost peer, if that is the reason."""


RunToRank = AdmitSpan | BeginSpan | GrantSlots | StartSpan | HoldSpan | ContinueSpan | FinishSpan | SuspendRequest
RunFromRank = WantSlots | SpanBegun | LayerEdge | SpanHalted | SpanComputed | SpanEnded | SpanBroken
ToRank = rank_notes.ToRank | RunToRank
FromRank = rank_notes.FromRank | RunFromRank

encode = msgspec.msgpack.Encoder().encode
to_rank: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
from_rank: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)
