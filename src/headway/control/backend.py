"""What a `Machine` has done by others: everything that computes, moves bytes, or knows how long that takes.

The simulator's hands let virtual time pass; a router's send messages to instances; a replay's read a log. Hands say
nothing back from inside a call, but what it returns or raises (and `Machine.cancel` from within `forget`): what has
become of something is told by a callback of the machine, later.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from headway.control.queue_entries import SpanEntry
from headway.control.request import ControlledRequest
from headway.control.transfer_queue import KvSlice
from headway.core.request import Request
from headway.core.span import Phase, Span


class ActionImpossible(Exception):  # noqa: N818 - caught where it is raised for
    """An action cannot be carried out; says why. The policy is told `Refused`."""


class SchedulerStats(msgspec.Struct, frozen=True, gc=False):
    """What the schedulers of an instance have: when their prefills will be done (absolute, predicted), prompt tokens
    that are not computed, KV tokens that are leased, requests."""

    free_at_s: float = 0.0
    queued: float = 0.0
    used: int = 0
    running: int = 0


class InstanceBackend(Protocol):
    """One a machine. `now`: the time that the machine was given with the callback which led here."""

    # -- what it expects ----------------------------------------------------------------------------------------------

    def span_s(self, spans: Sequence[Span], nodes: int, before: tuple[int, ...]) -> float:
        """Predicted seconds of one span on its group, over so many nodes, alone; or of several requests' spans as one
        batch. before: the group of the span before it, whose KV has to be spread over this one's."""

    def stay_s(self, request: Request, group: tuple[int, ...]) -> tuple[int, float]:
        """Tokens to prefill of a request in the scheduler of a group, and the seconds that they take, alone."""

    def busy_s(self, group: tuple[int, ...]) -> float:
        """When the prefills are expected to be done that the schedulers of these instances have now. Absolute; 0.0 or
        the past: they have none."""

    def refresh(self, instance: int) -> SchedulerStats:
        """Something has changed there (a span ended, a request entered …): what its schedulers have now. Called before
        the policy is asked, once for each instance that was touched."""

    def fits(self, entry: SpanEntry) -> bool:
        """Whether there is room on a span's group for the KV that its request, and those along, will have there. Asked
        when all else lets it begin, which it does not before there is: decodes that wait behind it go first meanwhile.
        Asked again whenever something has changed there."""
        return True

    # -- what it does -------------------------------------------------------------------------------------------------

    def committed(self, entry: SpanEntry, now: float) -> None:
        """A span has been put on its lanes (of a batch: the lead's entry, once). Work ahead of its turn."""
        return

    def begin(self, entry: SpanEntry, now: float) -> None:
        """Compute a span, and those `along`, from `entry.layer` on (`resumed`: it was paused, its state is on its
        group). `Machine.span_done` or `span_paused` follows."""

    def pause(self, entry: SpanEntry, now: float) -> None:
        """Ask a running span to pause at the next layer edge; `span_paused` or `span_done` follows. Raises Impossible
        when it is too late."""

    def stop(self, entry: SpanEntry, now: float) -> None:
        """Nobody needs a running span any more: its request has ended (all of a batch have). Nothing follows."""

    def enter(self, journey: ControlledRequest, group: tuple[int, ...], phase: Phase, now: float) -> None:
        """Give a request to the scheduler of a group. `Machine.stayed` follows, or `drop`. Raises RequestError when it
        can never be served there."""

    def leave(self, journey: ControlledRequest, why: str, now: float) -> int:
        """Take a request out of the scheduler of `journey.group`; all output tokens that it has now. Its KV stays
        (`why` "moved") or may go (`why` "ended")."""

    def announced(self, journey: ControlledRequest, target: int, now: float) -> None:
        """KV of a request will be sent to an instance, which may see to room for it. `send` of each piece follows."""
        return

    def send(self, piece: KvSlice, now: float) -> None:
        """A piece may be sent: its sender is free, and a backend of its target is kept for it until `Machine.sent`."""

    def forget(self, journey: ControlledRequest, why: str | None, now: float) -> None:
        """A request has ended, with all of its output (`why` None) or without. Nothing of it is needed anywhere. Where
        its bytes stop at once, call `Machine.cancel`; else tell `sent` of each piece that is under way."""

    def pump(self, now: float) -> None:
        """Everything that may begin has begun: schedulers may go on with their iterations."""

    # -- what it may watch --------------------------------------------------------------------------------------------

    def held(self, holder: str, group: tuple[int, ...], now: float) -> None:
        """A hold was granted."""
        return

    def released(self, holder: str, instances: Iterable[int], now: float) -> None:
        """Instances are held no longer."""
        return
