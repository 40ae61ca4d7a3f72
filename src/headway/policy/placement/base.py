"""The contract of a cluster policy: events and a view of the cluster in, actions out.

A placement decides *where, and which span*; an instance's scheduler decides how many tokens an iteration takes. It is
a deterministic state machine: no clock, no randomness without a seed, nothing of a simulator. Whoever drives it (the
cluster simulator, a live router) calls `on_event` once an event, in order of time, carries out the actions in order,
and tells what became of them as later events.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec

from headway.core.request import Request
from headway.core.span import Phase as Phase
from headway.core.span import Span
from headway.policy.placement.view import ClusterSnapshot


class SpanProgress(NamedTuple):
    """How far a span that was paused has come: its tokens before `tokens` are complete in all layers, and its rest in
    the first `layer` layers (PecSched §5.1). `layer` 0 is a chunk edge."""

    tokens: int
    layer: int


# -- what has happened -------------------------------------------------------------------------------------------------


class RequestArrived(msgspec.Struct, frozen=True):
    """A request is there. Exactly one of Commit, Enqueue and Reject must follow some time, or it waits for ever."""

    request: Request


class SpanDone(msgspec.Struct, frozen=True):
    """A committed span is complete on its group. `last`: it was the prompt's last one, so the first token is there."""

    request: str
    index: int
    last: bool


class RequestPrefilled(msgspec.Struct, frozen=True):
    """A request that was enqueued for prefill only has its first token; its KV lies on `group`."""

    request: str
    group: tuple[int, ...]


class SpanPaused(msgspec.Struct, frozen=True):
    """A preempted request has let go of its group, with its state kept there."""

    request: str
    index: int
    progress: SpanProgress


class KvReady(msgspec.Struct, frozen=True):
    """All KV that was to be transferred to an instance is there."""

    request: str
    instance: int


class HoldGranted(msgspec.Struct, frozen=True):
    """A hold has been granted, on the whole group at once."""

    holder: str
    group: tuple[int, ...]


class RequestFinished(msgspec.Struct, frozen=True):
    """A request has all of its output. What it held is free."""

    request: str


class RequestDropped(msgspec.Struct, frozen=True):
    """A request has ended without all of its output: its client left, or an instance refused it. `why` says."""

    request: str
    why: str


class ActionRefused(msgspec.Struct, frozen=True):
    """An action was not carried out, and nothing of it was: the view that it was made from had gone stale, or it was
    impossible. The policy may try again with the view that it is given now."""

    request: str
    verb: str
    why: str


class InstanceLost(msgspec.Struct, frozen=True):
    """An instance is gone, and with it the KV on it. (The simulator loses none yet.)"""

    instance: int


class WakeupDue(msgspec.Struct, frozen=True):
    """The time that `next_wakeup` asked for has come."""


Event = (
    RequestArrived
    | SpanDone
    | RequestPrefilled
    | SpanPaused
    | KvReady
    | HoldGranted
    | RequestFinished
    | RequestDropped
    | ActionRefused
    | InstanceLost
    | WakeupDue
)


# -- what is to be done ------------------------------------------------------------------------------------------------


class CommitSpans(msgspec.Struct, frozen=True):
    """Compute these spans of a request, in order, each on its group as one ring that starts together.

    Spans take their turn on every instance of their group in the order in which they were committed. Checked against
    `version`: refused whole when an instance of a group has changed since. beside: they need not wait until requests
    that run on their instances by way of `EnqueueRequest` have ended, and these go on beside them.

    along: spans of other requests that are computed with this one's only span as one batch, on the same group: they
    begin and end together, and SpanDone comes for each. A batch cannot be preempted.
    """

    request: str
    spans: tuple[Span, ...]
    version: int
    beside: bool = False
    along: tuple[Span, ...] = ()


class HoldGroup(msgspec.Struct, frozen=True):
    """Keep a group for one holder (a request's id, or any name): others' spans and requests wait until Release.

    Granted on all instances at once, when it is its turn on each; acquired in order of (node, id). A holder's spans
    must lie within what it holds. A holder may extend what it has only by instances that are free at once."""

    holder: str
    group: tuple[int, ...]


class ReleaseGroup(msgspec.Struct, frozen=True):
    """Give up some instances, or all (`group` empty), that a holder holds or waits for."""

    holder: str
    group: tuple[int, ...] = ()


class EnqueueRequest(msgspec.Struct, frozen=True):
    """Give a request to the scheduler of an instance, or of a group of instances that work as one, which batches it
    with others.

    phase: all of it; its prefill only (`RequestPrefilled` follows); its decode only (its KV must be there). Waits
    behind spans
    that were committed to the instance before, unless beside.
    """

    request: str
    group: tuple[int, ...]
    phase: Phase = "all"
    beside: bool = False


class PreemptRequest(msgspec.Struct, frozen=True):
    """Pause a request's running span at the next layer edge; its later spans leave the queues. `SpanPaused` follows.

    A decode is paused after its running iteration, and goes on when it is enqueued again."""

    request: str


class ResumeRequest(msgspec.Struct, frozen=True):
    """Go on with a paused request, before all that waits on its instances. `lost_s`: seconds to restore its state."""

    request: str
    lost_s: float = 0.0


class TransferKv(msgspec.Struct, frozen=True):
    """Move KV to an instance: of one committed span (begun with its handshake when the span begins, and carried layer
    by layer as it is computed), or of all the KV of a request, now (`index` None; `overlapped`: all but the last layer
    has been sent while it was computed). `KvReady` comes once, when nothing of the request is under way any more."""

    request: str
    to: int
    index: int | None = None
    overlapped: bool = False


class RejectRequest(msgspec.Struct, frozen=True):
    """The request cannot be served; `why` is for its client."""

    request: str
    why: str


Action = (
    CommitSpans
    | HoldGroup
    | ReleaseGroup
    | EnqueueRequest
    | PreemptRequest
    | ResumeRequest
    | TransferKv
    | RejectRequest
)


class PlacementPolicy(Protocol):
    """A cluster policy. Made by `policy.placement.registry.make_placement`."""

    def on_event(self, event: Event, view: ClusterSnapshot) -> Sequence[Action]:
        """What to do now. `view` holds until the call returns; keep numbers, not the view."""

    def next_wakeup(self, now: float) -> float | None:
        """When to be told `WakeupDue`, if nothing else happens before; None: no need. Asked after every event."""
