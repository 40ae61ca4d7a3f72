"""What an engine and its ranks say to each other of runs (`runtime.executor.messages.Aside`, `Word`), beside
`rank_notes`.

All is of one request, by its name. The engine says a thing to all ranks and waits for a word of each; of several
requests it speaks in turn. A prompt is told once; nothing else grows with a context, but slots by their runs.
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
    """Take up a run (`Runs.begin`). Answered by `WantSlots`, as often as there is, then `SpanBegun`."""

    name: str
    run: SpanTask
    before: tuple[SpanTask, ...]
    preemptible: bool
    drawn: tuple[int, ...]


class GrantSlots(msgspec.Struct, frozen=True, array_like=True, tag="given"):
    """The slots of a place that was wanted, as runs."""

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
    """Pause at the next layer edge. Of use to the first rank of a run's group."""

    name: str


class ContinueSpan(msgspec.Struct, frozen=True, array_like=True, tag="on"):
    """Go on behind an `LayerEdge`."""

    name: str


class FinishSpan(msgspec.Struct, frozen=True, array_like=True, tag="finish"):
    """See `Runs.finish`. Answered by `SpanEnded`."""

    name: str
    draw: bool


class SuspendRequest(msgspec.Struct, frozen=True, array_like=True, tag="cease"):
    """No run of a request is of interest any more: the one under way ends. What moves of its KV goes on moving: from
    the blocks of its `number`, if they have become its own (`NOBODY`: they have not)."""

    name: str
    number: int


class WantSlots(msgspec.Struct, frozen=True, array_like=True, tag="want"):
    """Room is needed (`runs.Room`)."""

    name: str
    tokens: int
    anew: bool


class SpanBegun(msgspec.Struct, frozen=True, array_like=True, tag="begun"):
    """A run can go."""

    name: str


class LayerEdge(msgspec.Struct, frozen=True, array_like=True, tag="edge"):
    """So many layers of a run's piece are done."""

    name: str
    layers: int


class SpanHalted(msgspec.Struct, frozen=True, array_like=True, tag="halted"):
    """A run is paused (`Runs.saved`); bytes of this rank."""

    name: str
    tokens: int
    layer: int
    kv_bytes: int
    activation_bytes: int
    kv_bytes_at_end: int


class SpanComputed(msgspec.Struct, frozen=True, array_like=True, tag="through"):
    """All layers of a run are done."""

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
    """The peer that is missing, if that is the reason."""


RunToRank = AdmitSpan | BeginSpan | GrantSlots | StartSpan | HoldSpan | ContinueSpan | FinishSpan | SuspendRequest
RunFromRank = WantSlots | SpanBegun | LayerEdge | SpanHalted | SpanComputed | SpanEnded | SpanBroken
ToRank = rank_notes.ToRank | RunToRank
FromRank = rank_notes.FromRank | RunFromRank

encode = msgspec.msgpack.Encoder().encode
to_rank: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
from_rank: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)
