"""The seam below `ClusterController`: everything that computes, moves bytes, or predicts how long that takes.

The simulator's backend lets virtual time pass, and the live one sends messages to instances. During a call a backend
only returns or raises. Outcomes, also those that are known at once, are events that its driver gives to the controller
after the call.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from headway.control.entries import ControlledRequest, KvSlice, SpanEntry
from headway.core.request import Phase, Request, Span
from headway.policy.placement.contract import ALL_CAPABILITIES, Capability


class ActionImpossible(Exception):  # noqa: N818 - caught where it is raised for
    """An action cannot be carried out; the message says why. The policy receives `ActionRefused`."""


class SchedulerStats(msgspec.Struct, frozen=True, gc=False):
    """Load of the schedulers of one instance."""

    free_at_s: float = 0.0
    """Predicted absolute time at which their prefills are done."""
    queued: float = 0.0
    """Prompt tokens that are not computed."""
    used: int = 0
    """KV tokens that are leased."""
    running: int = 0
    """Requests that are resident in them."""


class InstanceBackend(Protocol):
    """Predictions, actions and notifications that a controller needs; one backend for each controller. `now`: the time,
    in seconds, given to the controller with the callback that led to the call."""

    capabilities: frozenset[Capability] = ALL_CAPABILITIES
    """What its instances can do; actions that need more are refused before they reach it."""

    # -- predictions --------------------------------------------------------------------------------------------------

    def span_s(self, spans: Sequence[Span], nodes: int, before: tuple[int, ...]) -> float:
        """Return the predicted seconds of one span on its group, over so many nodes; or of several requests' spans as
        one batch. before: the group of the request's previous span, whose KV has to be spread over this group."""

    def prefill_estimate(self, request: Request, group: tuple[int, ...]) -> tuple[int, float]:
        """Return the tokens to prefill of a request in the scheduler of a group, and their predicted seconds alone."""

    def busy_s(self, group: tuple[int, ...]) -> float:
        """Return the absolute time at which the prefills in the schedulers of these instances will be done; 0.0 or a
        past time: they have none."""

    def refresh(self, instance: int) -> SchedulerStats:
        """Return the load of an instance's schedulers after a change (a span ended, a request entered …). Called once
        for each changed instance, before the policy is asked."""

    def fits(self, entry: SpanEntry) -> bool:
        """Return whether a span's group has enough free tokens for the KV of its request, and of those batched with it.
        Called when nothing else keeps the span from beginning, and again after every change on the group; until then
        decodes that wait behind the span go first."""
        return True

    # -- actions -----------------------------------------------------------------------------------------------------

    def committed(self, entry: SpanEntry, now: float) -> None:
        """A span has been queued (of a batch: once, the first entry): prepare it ahead of its turn."""
        return

    def begin(self, entry: SpanEntry, now: float) -> None:
        """Compute a span, and those batched with it, from `entry.layer` on (`resumed`: it was paused, and its group has
        its state). `ClusterController.span_done` or `span_paused` follows."""

    def pause(self, entry: SpanEntry, now: float) -> None:
        """Pause a running span at the next layer edge; `span_paused` or `span_done` follows. Raises ActionImpossible if
        it is too late."""

    def stop(self, entry: SpanEntry, now: float) -> None:
        """Abort a running span whose request has ended (of a batch: all requests). No callback follows."""
        return

    def enter(self, controlled: ControlledRequest, group: tuple[int, ...], phase: Phase, now: float) -> None:
        """Give a request to the scheduler of a group; `ClusterController.left_scheduler` or `drop` follows. Raises
        RequestError if it can never be served there."""

    def leave(self, controlled: ControlledRequest, why: str, now: float) -> int:
        """Take a request out of the scheduler of its group, and return the number of its output tokens. Its KV is kept
        (`why` "moved") or may be freed (`why` "ended")."""

    def announced(self, controlled: ControlledRequest, target: int, now: float) -> None:
        """KV of a request will be sent to an instance, which may reserve blocks for it. `send` of each slice
        follows."""
        return

    def ready(self, kv_slice: KvSlice) -> bool:
        """Return whether a slice could be sent now: its target has blocks for it, and its KV does not move meanwhile.
        Called when its sender and a receiver are free; until it is, others get them."""
        return True

    def send(self, kv_slice: KvSlice, now: float) -> None:
        """Send a KV slice that is `ready`: its sender is free, and one of its target's receivers is reserved until
        `ClusterController.sent`."""

    def forget(self, controlled: ControlledRequest, why: str | None, now: float) -> bool:
        """Free everything of a request that has ended, with all of its output (`why` None) or without. Return whether
        its transfers stop at once; else `sent` follows for each slice under way."""

    def pump(self, now: float) -> None:
        """Let schedulers continue with their iterations: everything that may begin has begun."""
        return

    # -- notifications ------------------------------------------------------------------------------------------------

    def held(self, holder: str, group: tuple[int, ...], now: float) -> None:
        """A reservation was granted."""
        return

    def released(self, holder: str, instances: Iterable[int], now: float) -> None:
        """Reserved instances are free."""
        return
