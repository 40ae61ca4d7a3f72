"""The live cluster's controller: messages of instances go in; deltas, policy events and messages to instances come out.

One per cluster, made when the first instances are ready. Everything happens on the asyncio event loop, in the order in
which messages arrive; after each of them the `ClusterController` is settled once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import NamedTuple

from headway.control.controller import ClusterController
from headway.control.decision_log import RecordingController
from headway.core.errors import RequestError
from headway.perf.hardware.shapes import ModelShape
from headway.policy.placement.base import PlacementPolicy
from headway.policy.placement.view import ClusterLinks, ClusterState
from headway.runtime.cluster.attempt import AttemptTable
from headway.runtime.cluster.instance_messages import InstanceMessages
from headway.runtime.cluster.instance_registry import InstanceRegistry
from headway.runtime.cluster.live_backend import (
    BatchComplete,
    DecodeOver,
    LatencyOf,
    LiveBackend,
    RequestReleased,
    SliceSent,
)
from headway.runtime.cluster.live_requests import LiveRequests
from headway.runtime.cluster.membership import LiveMembership
from headway.runtime.cluster.policies import PlacementChain
from headway.runtime.cluster.settling_loop import SettlingLoop

log = logging.getLogger("headway.cluster")


class DecisionLog(NamedTuple):
    """Destination of the lines of `control.decision_log`."""

    sink: Callable[[bytes], object]
    """Called with each line."""
    about: object
    """What else a replay needs: written once, at the head of the log."""


class LiveController:
    """Drives one `ClusterController` over live instances: puts the parts together, and settles them."""

    def __init__(
        self,
        fleet: InstanceRegistry,
        links: ClusterLinks,
        make: Callable[[], PlacementPolicy],
        latency_of: LatencyOf,
        shape: ModelShape,
        backends: int = 16,
        most_losses: int = 3,
        in_place: bool = False,
        rows: int = 0,
        log: DecisionLog | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open all instances of `fleet`; those that are not ready yet are closed again at once.

        make: returns a new policy. shape: of the model. backends: slices of KV that an instance receives at a time.
        most_losses: see `LiveRequests`. in_place: groups decode where their KV lies (`LiveResidency`). rows: see
        `SpanTask.rows`. log: of all decisions, for a replay. clock: seconds, of the same clock as the event loop's.
        """
        self._clock = clock
        attempts = AttemptTable()
        book = ClusterState([each.initial_instance for each in fleet], links)
        self.hands = LiveBackend(
            fleet,
            attempts,
            latency_of,
            shape,
            in_place,
            rows,
            clock,
        )
        self.policies = PlacementChain(make)
        kind = ClusterController if log is None else partial(RecordingController, sink=log.sink, about=log.about)
        self.machine: ClusterController = kind(
            book, self.hands, self.policies, layers=shape.layers, receive_backends=backends
        )
        self._loop = SettlingLoop(self.machine, self.hands.expecting, self._follow, clock)
        self.settle = settle = self._loop.settle
        self.requests = LiveRequests(self.machine, fleet, attempts, most_losses, settle, clock)
        self.membership = LiveMembership(self.machine, book, fleet, self.hands, make, self.requests, settle, clock)
        self.messages = InstanceMessages(self.machine, self.hands, self.requests, self.membership, settle, clock)
        # The controller opens every instance of its snapshot; those that are not ready join later through `joined`.
        for each in fleet:
            if each.state != "ready":
                self.machine.lost(each.number, clock())

    def close(self) -> None:
        """Cancel all timers."""
        self._loop.close()
        self.membership.stop()
        self.requests.retries.close()

    # -- what came up inside calls of the controller ------------------------------------------------------------------

    def _follow(self) -> bool:
        """Report back what came up inside calls of the controller, which is not re-entrant; True if there was any."""
        # Every part runs, whatever those before it return.
        some = [self._take_events(), self._follow_unplaced(), self._follow_kv_claims(), self._take_events()]
        # Last, so that new attempts see all that was freed above.
        some.append(self.requests.begin_due())
        self.membership.end_drained()
        return any(some)

    def _take_events(self) -> bool:
        """Give the controller what its backend has reported, in order; what these calls add is left for the next
        round."""
        events = self.hands.events
        some = False
        for event in [events.popleft() for _ in range(len(events))]:
            match event:
                case SliceSent(kv_slice):
                    some = True
                    with self._isolate(kv_slice.request):
                        self.machine.sent(kv_slice, self._clock())
                # It may have been dropped since.
                case BatchComplete(entry) if entry.state == "running":
                    some = True
                    with self._isolate(entry.owner):
                        self.messages.complete(entry)
                # The decode ends as soon as it has begun.
                case DecodeOver(attempt) if attempt.controlled.resident:
                    some = True
                    with self._isolate(attempt.request.id):
                        self.messages.decoded(attempt, True)
                case RequestReleased(attempt, why):
                    if why is not None and attempt.controlled.rejected:
                        attempt.asked.fail(RequestError(why))
                    if why is None or attempt.controlled.rejected:
                        self.requests.ended(attempt)
        return some

    def _follow_unplaced(self) -> bool:
        """Let the requests that no policy will place arrive again."""
        some = False
        for name, failed in self.policies.unplaced.items():
            attempt = self.requests.attempts.named(name)
            # An end that failed half-way would be tried for ever.
            if attempt is not None and not attempt.controlled.ended:
                some = True
                # Counted as a loss, so that a policy that always fails does not retry for ever.
                attempt.asked.runs_lost += failed
                why = "its instances are gone, or its placement failed" if failed else "instances have come or gone"
                with self._isolate(name):
                    self.requests.retry(attempt, why)
        return some

    def _follow_kv_claims(self) -> bool:
        """A request that waits for KV which others, directly or not, would only free after it: it begins again."""
        kv = self.hands.fleet.kv
        check = kv.grown and bool(self.hands.moves.waiting)
        found = self.requests.gives_way() if check else None
        # After one has given way, others may still wait for each other.
        kv.grown = found is not None
        if found is not None:
            attempt, helps = found
            why = "requests would wait for each other's room for KV"
            with self._isolate(attempt.request.id):
                self.requests.retry(attempt, why, later=not helps)
        return found is not None

    def _isolate(self, name: str) -> AbstractContextManager[None]:
        """Context in which an error fails one request only. Nothing is settled afterwards."""
        return self.requests.isolate(self.requests.attempts.named(name), name)
