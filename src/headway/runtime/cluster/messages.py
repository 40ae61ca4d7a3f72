"""Messages between the controller and an instance, beside those of `runtime.engine.protocol`.

All travel on the engine's one socket. Requests are named by an id that the router makes anew for each attempt at a
request: what an instance still says of an attempt that was given up names nobody. Instances are named by their number
in the cluster. Numbers of tokens count from the beginning of the prompt.
"""

from __future__ import annotations

import msgspec

from headway.core.sampling import SamplingParams
from headway.core.span import SpanTask as SpanTask
from headway.runtime.engine.protocol import OutputDelta
from headway.runtime.kv_transfer.peer import PeerAddress as PeerAddress


class MeetPeers(msgspec.Struct, frozen=True, tag=True):
    """All instances that are there now, the one that is told included. Sent whenever that changes. Channels to an
    incarnation that is not named any more are closed, and who waits on one is told that it is lost."""

    peers: tuple[PeerAddress, ...]


class AdmitRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A request whose spans will be computed here, or whose KV comes here. The prompt's token ids follow as the next
    frame (int32, little-endian), once. `output`: what it has said already; its first token here is the next."""

    id: str
    prompt_tokens: int
    params: SamplingParams
    output: tuple[int, ...] = ()


class ComputeSpan(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Compute a run of a request, together with the rest of its group, to each of which this is sent. `before`: the
    runs that were computed before it, in order: where the KV lies follows from them. `last`: the prompt ends with it,
    and the group's first instance draws a token. `beside`: the scheduler's iterations go on meanwhile, between layers;
    otherwise they stop until the run has ended or paused. `drawn`: tokens of the request that end with the run's last
    one, so many as may be unknown here: those drawn by other instances since `AdmitRequest`. `home`: the instance
    where a
    scheduler has left KV of all tokens before the run, which is the run's from now on; `before` says so too."""

    id: str
    index: int
    run: SpanTask
    drawn: tuple[int, ...] = ()
    before: tuple[SpanTask, ...] = ()
    last: bool = False
    beside: bool = False
    home: int | None = None
    preemptible: bool = False


class PauseSpan(msgspec.Struct, frozen=True, tag=True):
    """Sent to the first instance of the group that computes: stop at the next layer edge, of whatever piece of the run
    is computed then. `SpanTaskPaused` comes from all of the group, or `SpanTaskDone` where the last layer had begun."""

    id: str


class ResumeSpan(msgspec.Struct, frozen=True, tag=True):
    """Continue a paused span. Sent to all instances of the group."""

    id: str


class ReserveKv(msgspec.Struct, frozen=True, tag=True):
    """Keep room for `tokens` tokens of a request that was admitted: its KV will come. `KvReserved` comes when there is
    room, in order of asking. serial: comes back with that; an instance that a request has left may be asked again."""

    id: str
    tokens: int
    serial: int = 0


class SendKv(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Bring the KV of tokens [start, end) that lies here, or will when the run under way has computed it, to instance
    `to`, layer by layer as soon as each is there. `piece` is the name of this movement: `KvArrived` tells of it,
    from the
    receiver. Only to an instance that has said `KvReserved`."""

    id: str
    piece: int
    start: int
    end: int
    to: int


class ForgetRequest(msgspec.Struct, frozen=True, tag=True):
    """Drop all that is here of a request: its runs, its stay in the scheduler, its KV, what is sent and awaited.
    for_good: nothing of it comes again, so that what is still on its way may be refused. Otherwise nothing is."""

    id: str
    for_good: bool = True


class HaltDecode(msgspec.Struct, frozen=True, tag=True):
    """Take a request that decodes out of the scheduler behind the token under way: `KvStaged` follows, and it goes on
    elsewhere; or its last delta, where it ends with that token."""

    id: str


class SpanTaskDone(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A span is complete on this instance.

    Times are CLOCK_MONOTONIC. `delta`: from the first instance, after the last run: the token (`finish` set where it
    ends the request).
    """

    id: str
    index: int
    began_s: float
    ended_s: float
    delta: OutputDelta | None = None


class SpanTaskPaused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A run has stopped: its tokens before `tokens` (counted from the beginning of the prompt) are complete in all
    layers, and the piece behind them in the first `layer`. Bytes are of this instance
    (`runtime.sequence_parallel.saved`), at
    the end: of the run."""

    id: str
    index: int
    tokens: int
    layer: int
    kv_bytes: int
    activation_bytes: int
    kv_bytes_at_end: int


class SpanTaskLost(msgspec.Struct, frozen=True, tag=True):
    """A run, or what was to be sent, cannot be completed here. The router forgets the attempt. by: the instance that it
    is laid to: one that cannot be reached from here, or this one itself, where something has failed; None: neither."""

    id: str
    why: str
    by: int | None = None


class KvReserved(msgspec.Struct, frozen=True, tag=True):
    """Room for a request's KV is reserved."""

    id: str
    serial: int = 0


class KvStaged(msgspec.Struct, frozen=True, tag=True):
    """A request of phase "prefill" has its first token (told as a delta before this), or one that decodes was told to
    `HaltDecode`, and it has left the scheduler; its KV of `tokens` tokens stays until `ForgetRequest`, a stay of
    phase "decode" or a
    run of which this is the `home`."""

    id: str
    tokens: int


class KvArrived(msgspec.Struct, frozen=True, tag=True):
    """A slice of KV has arrived. Sent by the receiver.

    `source`: who sent it. Times are CLOCK_MONOTONIC: first and last byte.
    """

    id: str
    piece: int
    source: int
    began_s: float
    ended_s: float


ToInstance = (
    MeetPeers | AdmitRequest | ComputeSpan | PauseSpan | ResumeSpan | ReserveKv | SendKv | ForgetRequest | HaltDecode
)
FromInstance = SpanTaskDone | SpanTaskPaused | SpanTaskLost | KvReserved | KvStaged | KvArrived
