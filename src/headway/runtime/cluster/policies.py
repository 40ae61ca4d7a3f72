"""Placement policies, replaced as instances come and go.

Policies keep state about instances: groups, queues, reservations. They hear of a change of membership and need not
handle it: a new policy is made from the present instances, and gets all new requests. The older ones continue with the
requests that they have placed, until the last of these has ended; the driver lets those that they had not placed arrive
again (`PlacementChain.unplaced`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from typing_extensions import override

from headway.policy.placement.contract import (
    Action,
    ClusterSnapshot,
    CommitSpans,
    EnqueueRequest,
    Event,
    HoldGranted,
    HoldGroup,
    InstanceJoined,
    InstanceLeft,
    InstanceLost,
    LoadAwareRates,
    PlacementPolicy,
    RatesReplaced,
    RateTable,
    ReleaseGroup,
    RequestArrived,
    RequestDropped,
    RequestFinished,
    TransferKv,
    WakeupDue,
)

log = logging.getLogger("headway.cluster")


class PlacementChain(PlacementPolicy):
    """A `PlacementPolicy` made of several: each request belongs to the one that was the newest at its arrival."""

    def __init__(self, make: Callable[[], PlacementPolicy]) -> None:
        """make: returns a new policy."""
        self._make = make
        self._newest = make()
        self._of: dict[str, PlacementPolicy] = {}
        self._has: dict[int, int] = {}
        self._alive: list[PlacementPolicy] = [self._newest]
        self._placed: dict[str, set[int]] = {}
        """Instances that each placed request was given to, without those that have been lost since."""
        self._due: list[tuple[PlacementPolicy, float]] = []
        self._rates: RateTable | None = None
        self.unplaced: dict[str, bool] = {}
        """Requests that no policy will place, in order, until they are dropped: the driver drops each and lets it
        arrive again, under another name. True: its placement failed, or named an instance that is gone; False: its
        policy has been replaced."""

    @property
    def has_rates(self) -> bool:
        """Whether the newest policy works with improvement rates (Tetris §6)."""
        return isinstance(self._newest, LoadAwareRates)

    def _renew(self) -> None:
        """Make a new policy after a change of membership."""
        self._newest = self._make()
        self._replace_rates()
        self._alive = [policy for policy in self._alive if self._has.get(id(policy))] + [self._newest]
        self.unplaced = {name: False for name in self._of if name not in self._placed} | self.unplaced

    def _replace_rates(self) -> None:
        if self._rates is not None and isinstance(self._newest, LoadAwareRates):
            self._newest.replace_rates(self._rates)

    @override
    def on_event(self, event: Event, view: ClusterSnapshot) -> Sequence[Action]:
        """Where a policy raises, its request is placed again, by the newest one: an
        older policy may raise at a cluster that it does not know."""
        wanted: list[Action] = []
        for policy in self._concerned(event, view):
            try:
                wanted += self._wanted(policy.on_event(event, view), view)
            except Exception:
                log.exception("a placement failed at %s", event)
                name = event.request.id if isinstance(event, RequestArrived) else getattr(event, "request", "")
                if name in self._of:
                    self.unplaced[name] = True
        return wanted

    def _concerned(self, event: Event, view: ClusterSnapshot) -> Sequence[PlacementPolicy]:
        """Take in an event; return the policies that are to receive it."""
        if isinstance(event, RequestArrived):
            self._of[event.request.id] = self._newest
            self._has[id(self._newest)] = self._has.get(id(self._newest), 0) + 1
            return [self._newest]
        if isinstance(event, WakeupDue):
            due, self._due = [policy for policy, at in self._due if at <= view.now_s], []
            return due
        if isinstance(event, RatesReplaced):
            self._rates = event.table
            self._replace_rates()
            return []
        if isinstance(event, InstanceJoined | InstanceLeft | InstanceLost):
            if isinstance(event, InstanceLost):
                for there in self._placed.values():
                    there.discard(event.instance)
            # The new one finds the change in its first snapshot; one without requests will never be asked for anything.
            asked = [policy for policy in self._alive if id(policy) in self._has]
            self._renew()
            return asked
        name = event.holder if isinstance(event, HoldGranted) else event.request
        policy = self._of.get(name)
        if policy is None:
            return []
        if isinstance(event, RequestFinished | RequestDropped):
            del self._of[name]
            self._placed.pop(name, None)
            self.unplaced.pop(name, None)
            self._left(policy)
        return [policy]

    @override
    def next_wakeup(self, now: float) -> float | None:
        self._due = []
        for policy in self._alive:
            try:
                at = policy.next_wakeup(now)
            except Exception:  # as in `on_event`; it is heard again with the next event
                log.exception("a placement failed at saying when to wake it")
                continue
            if at is not None:
                self._due.append((policy, at))
        return min((at for _, at in self._due), default=None)

    def _left(self, policy: PlacementPolicy) -> None:
        """Count the end of one of a policy's requests; drop the policy after its last one, unless it is the newest."""
        self._has[id(policy)] -= 1
        if not self._has[id(policy)]:
            del self._has[id(policy)]
            self._alive = [one for one in self._alive if one is self._newest or id(one) in self._has]

    def _wanted(self, actions: Sequence[Action], view: ClusterSnapshot) -> list[Action]:
        """Return the actions without those that name an instance that is gone, or is drained and new to the request."""
        wanted = []
        there = {i for ids in view.by_node.values() for i in ids}
        for action in actions:
            name = action.holder if isinstance(action, HoldGroup | ReleaseGroup) else action.request
            # One impossible action drops all later ones of that request: they may build on it.
            if name in self.unplaced:
                continue
            named = _instances(action)
            if not there.issuperset(named - self._placed.get(name, set())):
                self.unplaced[name] = True
                continue
            wanted.append(action)
            if isinstance(action, CommitSpans | EnqueueRequest | TransferKv):
                batched = action.batched_with if isinstance(action, CommitSpans) else ()
                for one in (name, *(span.request.id for span in batched)):
                    self._placed.setdefault(one, set()).update(named)
        return wanted


def _instances(action: Action) -> set[int]:
    if isinstance(action, CommitSpans):
        return {i for span in (*action.spans, *action.batched_with) for i in span.group}
    if isinstance(action, TransferKv):
        return {action.to}
    return set(action.group) if isinstance(action, EnqueueRequest | HoldGroup) else set()
