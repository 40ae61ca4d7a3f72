"""The live cluster's controller: messages of instances go in; deltas, policy events and messages to instances come out.

One per cluster, made when the first instances are ready. Everything happens on the asyncio event loop, in the order in
which messages arrive; after each of them the `ClusterController` is settled once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from headway.control.controller import ClusterController
from headway.control.decision_log import RecordingController
from headway.core.errors import RequestError
from headway.perf.hardware.shapes import ModelShape
from headway.policy.placement.base import PlacementPolicy
from headway.policy.placement.view import ClusterLinks, ClusterState
from headway.runtime.cluster.attempt import AttemptTable
from headway.runtime.cluster.instance_messages import InstanceMessages
from headway.runtime.cluster.instance_registry import InstanceRegistry
from headway.runtime.cluster.live_backend import LatencyOf, LiveBackend
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
        self._sent: list[Any] = []
        attempts = AttemptTable()
        book = ClusterState([each.initial_instance for each in fleet], links)
        self.hands = LiveBackend(
            fleet,
            attempts,
            latency_of,
            shape,
            in_place,
            rows,
            self._sent.append,
            lambda name: self.machine.cancel(name),
            clock,
        )
        self.policies = PlacementChain(make, lambda name, number: self.machine.may_use(name, number))
        kind = ClusterController if log is None else partial(RecordingController, sink=log.sink, about=log.about)
        self.machine: ClusterController = kind(
            book, self.hands, self.policies, layers=shape.layers, receive_backends=backends
        )
        self._loop = SettlingLoop(self.machine, self.hands.expecting, self._follow, clock)
        settle = self._loop.settle
        self.requests = LiveRequests(self.machine, fleet, attempts, most_losses, settle, clock)
        self.membership = LiveMembership(
            self.machine, book, fleet, self.hands, self.policies, make, self.requests, settle, clock
        )
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
        """Report back what came up inside calls of the controller, which is not re-entrant; True if there was any.

        Each list is swapped for an empty one before it is walked: what the calls add is left for the next round.
        """
        # Every part runs, whatever those before it return.
        some = [self._follow_kv(), self._follow_decodes(), self._follow_stranded(), self._follow_kv_claims()]
        self._follow_ended()
        # Last, so that new attempts see all that was freed above.
        some.append(self.requests.begin_due())
        return any(some)

    def _follow_kv(self) -> bool:
        """Slices that have arrived; batches that are complete because their last member's request ended."""
        # `_sent` is emptied in place: the backend holds a reference to the list itself.
        sent, self._sent[:] = list(self._sent), []
        for piece in sent:
            self._isolate(piece.request, partial(self.machine.sent, piece, self._clock()))
        completed, self.hands.completed = self.hands.completed, []
        some = bool(sent)
        for entry in completed:
            # it may have been dropped since
            if entry.state == "running":
                some = True
                self._isolate(entry.owner, partial(self.messages.complete, entry))
        return some

    def _follow_decodes(self) -> bool:
        """Requests whose last token came before their decode was placed: the decode ends as soon as it begins."""
        over, self.hands.over[:] = list(self.hands.over), []
        some = False
        for attempt in over:
            if attempt.controlled.resident:
                some = True
                self._isolate(attempt.request.id, partial(self.messages.decoded, attempt, True))
        return some

    def _follow_stranded(self) -> bool:
        """Requests that no policy owns: their placement raised, or named instances that are gone."""
        stranded, self.policies.stranded[:] = list(self.policies.stranded), []
        if stranded:
            self.machine.note("taken")
        some = False
        for name in stranded:
            attempt = self.requests.attempts.named(name)
            if attempt is not None:
                some = True
                # Counted as a loss, so that a policy that always fails does not retry for ever.
                attempt.asked.runs_lost += 1
                why = "its instances are gone, or its placement failed"
                self._isolate(name, partial(self.requests.retry, attempt, why))
        return some

    def _follow_ended(self) -> None:
        """Requests that the controller has ended: complete, or rejected by a policy."""
        while self.hands.ended:
            ended, why = self.hands.ended.popleft()
            if why is None:
                self.requests.ended(ended)
            elif ended.controlled.rejected:
                ended.asked.fail(RequestError(why))
                self.requests.ended(ended)

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
            self._isolate(attempt.request.id, partial(self.requests.retry, attempt, why, later=not helps))
        return found is not None

    def _isolate(self, name: str, act: Callable[[], object]) -> None:
        """Call `act` for one request; an error fails that request only. Nothing is settled afterwards."""
        self.requests.isolate(self.requests.attempts.named(name), name, lambda: bool(act()))
