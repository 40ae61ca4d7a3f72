"""Placement policies, replaced as instances come and go.

Policies keep state about instances: groups, queues, reservations. They hear of a change of membership and need not
handle it: a new policy is made from the present instances, and gets all new requests. The older ones continue with the
requests that they have placed, until the last of these has ended; requests that they had not placed go to the new one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from headway.policy.placement.base import (
    Action,
    CommitSpans,
    EnqueueRequest,
    Event,
    HoldGranted,
    HoldGroup,
    InstanceJoined,
    InstanceLeft,
    InstanceLost,
    PlacementPolicy,
    ReleaseGroup,
    RequestArrived,
    RequestDropped,
    RequestFinished,
    TransferKv,
    WakeupDue,
)
from headway.policy.placement.tetris_rates import LoadAwareRates, RateTable
from headway.policy.placement.view import ClusterSnapshot

RATES_NOTE = "rates "
"""Beginning of the decision log's note of a new table, which follows it as JSON."""

log = logging.getLogger("headway.cluster")


class PlacementChain:
    """A `PlacementPolicy` made of several: each request belongs to the one that was the newest at its arrival."""

    def __init__(self, make: Callable[[], PlacementPolicy], may: Callable[[str, int], bool]) -> None:
        """make: returns a new policy. may: whether a request may be given to an instance; not to one that is gone."""
        self._make, self._may = make, may
        self._newest = make()
        self._of: dict[str, PlacementPolicy] = {}
        self._has: dict[int, int] = {}
        self._alive: list[PlacementPolicy] = [self._newest]
        self._placed: set[str] = set()
        self._due: list[tuple[PlacementPolicy, float]] = []
        self._rates: RateTable | None = None
        self.stranded: list[str] = []
        """Requests that were to go to an instance that is gone, in order: they have to be placed again."""

    def renew(self) -> list[str]:
        """Make a new policy after a change of membership; return the requests that no policy has placed.

        The caller drops these and lets them arrive again, under other names.
        """
        self._newest = self._make()
        if self._rates is not None:
            self.replace_rates(self._rates)
        self._alive = [policy for policy in self._alive if self._has.get(id(policy))] + [self._newest]
        return [name for name in self._of if name not in self._placed]

    def replace_rates(self, table: RateTable) -> bool:
        """Give the newest policy, and those made after it, other improvement rates (Tetris §6). False: it has none."""
        if not isinstance(self._newest, LoadAwareRates):
            return False
        self._rates = table
        self._newest.replace_rates(table)
        return True

    def on_event(self, event: Event, view: ClusterSnapshot) -> Sequence[Action]:
        """See `PlacementPolicy.on_event`."""
        if isinstance(event, RequestArrived):
            self._of[event.request.id] = self._newest
            self._has[id(self._newest)] = self._has.get(id(self._newest), 0) + 1
            return self._ask(self._newest, event, view)
        if isinstance(event, WakeupDue):
            due, self._due = [policy for policy, at in self._due if at <= view.now_s], []
            return [action for policy in due for action in self._ask(policy, event, view)]
        if isinstance(event, InstanceJoined | InstanceLeft | InstanceLost):
            # A policy without requests was made from what is there now, or will never be asked for anything.
            asked = [policy for policy in self._alive if id(policy) in self._has]
            return [action for policy in asked for action in self._ask(policy, event, view)]
        name = event.holder if isinstance(event, HoldGranted) else event.request
        policy = self._of.get(name)
        if policy is None:
            return []
        if isinstance(event, RequestFinished | RequestDropped):
            del self._of[name]
            self._placed.discard(name)
            wanted = self._ask(policy, event, view)
            self._left(policy)
            return wanted
        return self._ask(policy, event, view)

    def next_wakeup(self, now: float) -> float | None:
        """See `PlacementPolicy.next_wakeup`."""
        self._due = []
        for policy in self._alive:
            try:
                at = policy.next_wakeup(now)
            except Exception:  # as in `_ask`; it is heard again with the next event
                log.exception("a placement failed at saying when to wake it")
                continue
            if at is not None:
                self._due.append((policy, at))
        return min((at for _, at in self._due), default=None)

    def _ask(self, policy: PlacementPolicy, event: Event, view: ClusterSnapshot) -> list[Action]:
        """Return a policy's actions; if it raises, its request is placed again, by the newest policy.

        An older policy may raise at a cluster that it does not know.
        """
        try:
            return self._wanted(policy.on_event(event, view))
        except Exception:
            log.exception("a placement failed at %s", event)
            name = event.request.id if isinstance(event, RequestArrived) else getattr(event, "request", "")
            if name in self._of and name not in self.stranded:
                self.stranded.append(name)
            return []

    def _left(self, policy: PlacementPolicy) -> None:
        """Count the end of one of a policy's requests; drop the policy after its last one, unless it is the newest."""
        self._has[id(policy)] -= 1
        if not self._has[id(policy)]:
            del self._has[id(policy)]
            self._alive = [one for one in self._alive if one is self._newest or id(one) in self._has]

    def _wanted(self, actions: Sequence[Action]) -> list[Action]:
        """Return the actions without those that name an instance that is gone."""
        wanted = []
        for action in actions:
            name = action.holder if isinstance(action, HoldGroup | ReleaseGroup) else action.request
            # One impossible action drops all later ones of that request: they may build on it.
            if name in self.stranded:
                continue
            if all(self._may(name, i) for i in _instances(action)):
                wanted.append(action)
                if isinstance(action, CommitSpans | EnqueueRequest):
                    self._placed.add(name)
                if isinstance(action, CommitSpans):
                    self._placed.update(span.request.id for span in action.batched_with)
            else:
                self.stranded.append(name)
        return wanted


def _instances(action: Action) -> list[int]:
    if isinstance(action, CommitSpans):
        return [i for span in (*action.spans, *action.batched_with) for i in span.group]
    if isinstance(action, TransferKv):
        return [action.to]
    return list(action.group) if isinstance(action, EnqueueRequest | HoldGroup) else []
