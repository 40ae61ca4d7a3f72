"""The contract of a cluster policy: events and a snapshot of the cluster in, actions out.

A placement policy decides where a span or a request goes and which goes first; an instance's scheduler decides how many
tokens an iteration computes. A policy is a deterministic state machine: no clock, no randomness without a seed, nothing
of the simulator. The driver (`control.controller.ClusterController`, for the simulator and the live cluster alike)
calls
`on_event` once for each event, in order of time, carries out the returned actions in order, and reports their outcome
as later events.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal, NamedTuple, Protocol

import msgspec

from headway.core.request import Request
from headway.core.span import Phase as Phase
from headway.core.span import Span
from headway.policy.placement.tetris_rates import RateTable
from headway.policy.placement.view import ClusterSnapshot

ActionName = Literal["commit", "hold", "release", "enqueue", "preempt", "resume", "transfer", "reject"]


class SpanProgress(NamedTuple):
    """How much of a paused span is computed (PecSched §5.1)."""

    tokens: int
    """Prompt tokens before this position are complete in all layers."""
    layer: int
    """The tokens after it are complete in the first `layer` layers; 0: the pause is at a chunk's edge."""


class CachedPrefix(msgspec.Struct, frozen=True):
    """KV of a prompt's first tokens that an instance has in its prefix cache."""

    instance: int
    tokens: int
    copy_s: float = 0.0
    """Predicted seconds to copy it to the request's group, from the action on; 0: it is there."""


# -- what has happened -------------------------------------------------------------------------------------------------


class RequestArrived(msgspec.Struct, frozen=True):
    """A new request. The policy must answer, now or later, with CommitSpans, EnqueueRequest or RejectRequest; without
    an answer the request waits for ever."""

    request: Request
    cached: tuple[int, ...] = ()
    """Tokens of the prompt that each instance has cached, by id; empty: nothing is known of any."""


class SpanDone(msgspec.Struct, frozen=True):
    """A committed span is complete on its whole group."""

    request: str
    index: int
    """Place of the span among the request's committed spans."""
    last: bool
    """The span was the prompt's last: the first output token exists."""


class RequestPrefilled(msgspec.Struct, frozen=True):
    """A request that was enqueued with phase "prefill" has its first token."""

    request: str
    group: tuple[int, ...]
    """Instances that hold its KV."""


class SpanPaused(msgspec.Struct, frozen=True):
    """A preempted request has stopped; its group keeps its state and may compute other work."""

    request: str
    index: int
    progress: SpanProgress


class KvReady(msgspec.Struct, frozen=True):
    """All KV of a request that was to be transferred to an instance has arrived there."""

    request: str
    instance: int


class HoldGranted(msgspec.Struct, frozen=True):
    """A hold was granted on its whole group at once."""

    holder: str
    group: tuple[int, ...]


class RequestFinished(msgspec.Struct, frozen=True):
    """A request has all of its output; everything that it held is free."""

    request: str


class RequestDropped(msgspec.Struct, frozen=True):
    """A request has ended without all of its output: the client left, it was rejected, or its instance was lost."""

    request: str
    why: str
    rejected: bool = False
    """The policy, or a scheduler, refused to serve it."""


class ActionRefused(msgspec.Struct, frozen=True):
    """An action was not carried out, not even in part: it was made from a stale snapshot, or is impossible. The policy
    may try again with the snapshot that comes with this event."""

    request: str
    """The action's request, or the holder of a HoldGroup or ReleaseGroup."""
    action: ActionName
    why: str


class InstanceJoined(msgspec.Struct, frozen=True):
    """An instance is there, new or again, and empty unless it was drained only. `WakeupDue` follows."""

    instance: int


class InstanceLeft(msgspec.Struct, frozen=True):
    """An instance is drained: requests there go on, and it takes no others. It has no role in snapshots any more."""

    instance: int


class InstanceLost(msgspec.Struct, frozen=True):
    """An instance is gone, with all KV on it. Requests that had KV or spans there have been dropped."""

    instance: int


class RatesReplaced(msgspec.Struct, frozen=True):
    """The cluster's operator has given it other improvement rates (Tetris §6). Of live clusters, whose
    `PlacementChain` takes it: policies do not receive it."""

    table: RateTable


class WakeupDue(msgspec.Struct, frozen=True):
    """The time that `next_wakeup` returned has come, or an instance was added."""


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
    | InstanceJoined
    | InstanceLeft
    | InstanceLost
    | RatesReplaced
    | WakeupDue
)


# -- what is to be done ------------------------------------------------------------------------------------------------


class CommitSpans(msgspec.Struct, frozen=True):
    """Compute these spans of a request in order, each on its group in lockstep.

    On every instance, spans run in the order in which they were committed. The action is refused whole when an instance
    of a group has changed since `version`.
    """

    name: ClassVar[ActionName] = "commit"
    request: str
    spans: tuple[Span, ...]
    version: int
    """`ClusterSnapshot.version` of the decision."""
    concurrent: bool = False
    """Run together with the requests in the instances' schedulers, instead of waiting until these have none."""
    batched_with: tuple[Span, ...] = ()
    """Spans of other requests to compute as one batch with this request's only span, on the same group. They begin and
    end together, SpanDone comes for each, and the batch cannot be preempted."""
    prefix: CachedPrefix | None = None
    """Cached KV behind which the first span begins; the span waits until the group has it."""


class HoldGroup(msgspec.Struct, frozen=True):
    """Reserve a group for one holder: spans and requests of others wait until ReleaseGroup.

    Granted on all instances at once, when its turn has come on each; instances are acquired in order of (node, id).
    Spans of a holder must lie within what it holds. A holder may extend its group only by instances that are free now.
    """

    name: ClassVar[ActionName] = "hold"
    holder: str
    """A request's id, or any other name."""
    group: tuple[int, ...]


class ReleaseGroup(msgspec.Struct, frozen=True):
    """Free instances that a holder holds or waits for."""

    name: ClassVar[ActionName] = "release"
    holder: str
    group: tuple[int, ...] = ()
    """Empty: all of the holder's."""


class EnqueueRequest(msgspec.Struct, frozen=True):
    """Give a request to the scheduler of an instance, or of a group that works as one; it is batched with others there.

    It waits behind spans that were committed to the instance before, unless `concurrent`.
    """

    name: ClassVar[ActionName] = "enqueue"
    request: str
    group: tuple[int, ...]
    phase: Phase = "all"
    """"prefill": RequestPrefilled follows; "decode": the request's KV must be on the group."""
    concurrent: bool = False
    """Run together with the spans on these instances, instead of behind them."""
    prefix: CachedPrefix | None = None
    """Cached KV that another instance sends to this one's prefix cache; the request waits for it there."""


class PreemptRequest(msgspec.Struct, frozen=True):
    """Pause a request. A running span stops at the next layer edge and the request's later spans leave the queues; a
    decode stops after its running iteration. `SpanPaused` follows. A paused decode goes on when it is enqueued again,
    a paused span with ResumeRequest."""

    name: ClassVar[ActionName] = "preempt"
    request: str


class ResumeRequest(msgspec.Struct, frozen=True):
    """Continue a paused request before everything that waits on its instances."""

    name: ClassVar[ActionName] = "resume"
    request: str
    lost_s: float = 0.0
    """Seconds to restore its state."""


class TransferKv(msgspec.Struct, frozen=True):
    """Move a request's KV to an instance. `KvReady` comes once, when no transfer of the request is under way."""

    name: ClassVar[ActionName] = "transfer"
    request: str
    to: int
    """The receiving instance."""
    index: int | None = None
    """One committed span: sent layer by layer while it is computed, after a handshake at its start. None: all KV, now.
    """
    overlapped: bool = False
    """All layers but the last were sent while they were computed. A live cluster's schedulers do not: there all of the
    KV goes now."""


class RejectRequest(msgspec.Struct, frozen=True):
    """End a request that cannot be served."""

    name: ClassVar[ActionName] = "reject"
    request: str
    why: str
    """Shown to the client."""


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
        """Return what to do now. `view` is valid until the call returns: keep numbers, not the view."""

    def next_wakeup(self, now: float) -> float | None:
        """Return when `WakeupDue` is needed if no other event comes first; None: never. Asked after every event."""
        return None
