"""The requests that a live cluster has accepted: begun, tried again after a loss, ended."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from headway.control.controller import ClusterController
from headway.control.kv_reservations import gives_way
from headway.core.errors import InvariantError
from headway.runtime.cluster.attempt import AttemptTable, RequestAttempt
from headway.runtime.cluster.cluster_request import ClusterRequest
from headway.runtime.cluster.instance_registry import InstanceRegistry
from headway.runtime.cluster.kv_claims import kv_claim
from headway.runtime.cluster.retries import RetryQueue

log = logging.getLogger("headway.cluster")


class LiveRequests:
    """All requests without a complete answer, by their clients' ids."""

    def __init__(
        self,
        machine: ClusterController,
        fleet: InstanceRegistry,
        attempts: AttemptTable,
        most_losses: int,
        settle: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        """most_losses: instances that may be lost with a request on them; with one more the request counts as the
        cause. settle: lets the controller act on what is pending."""
        self._machine, self._fleet, self._settle, self._clock = machine, fleet, settle, clock
        self.attempts = attempts
        self.asked: dict[str, ClusterRequest] = {}
        self.retries = RetryQueue(settle, most_losses)
        self.not_placeable: str | None = None
        """Why no request can be placed; None: requests can be placed."""

    @property
    def waiting(self) -> int:
        """Requests that have not begun anywhere."""
        begun = sum(1 for each in self.attempts if each.at is not None or each.runs)
        return len(self.asked) - begun

    @property
    def unanswered(self) -> int:
        """Requests without a first token."""
        return sum(1 for asked in self.asked.values() if not asked.answered)

    @property
    def running(self) -> int:
        """Requests with a span under way."""
        return sum(1 for attempt in self.attempts if attempt.running)

    # -- clients ------------------------------------------------------------------------------------------------------

    def leave(self, asked: ClusterRequest, why: str = "its client left") -> None:
        """Drop a request whose output is not awaited any more. Harmless when the request has ended."""
        if self.asked.pop(asked.submit.id, None) is None:
            return
        self.retries.forget(asked)
        attempt = self.attempts.named(asked.name)
        if attempt is None:
            return
        try:
            self._machine.drop(attempt.controlled, why, self._clock())
        except Exception:
            # The controller's own clean-up did not finish: free the instances directly, or their KV would leak.
            log.exception("the controller has failed at letting go of %s", attempt.wire)
            self._fleet.forget(attempt)
            self.attempts.remove(attempt)
        self._settle()

    def fail(self, asked: ClusterRequest, error: Exception) -> None:
        """End a request with an error."""
        asked.fail(error)
        self.leave(asked)

    def fail_all(self, error: Exception) -> None:
        """Fail all requests: no instance is left, and none will join."""
        for asked in list(self.asked.values()):
            self.fail(asked, error)

    # -- attempts -----------------------------------------------------------------------------------------------------

    def begin(self, asked: ClusterRequest) -> None:
        """Accept a request, and begin the first or another attempt at it; fail it if the controller raises."""
        self.asked[asked.submit.id] = asked
        # Without a usable set of instances a policy would raise: the request waits for the next change of membership.
        if self.not_placeable is not None:
            self.retries.wait(asked)
            return
        if (error := self.retries.given_up(asked)) is not None:
            self.fail(asked, error)
            return
        attempt = RequestAttempt(asked, asked.try_again())
        with self.isolate(attempt, f"placing {asked.submit.id}"):
            # One that failed behind a prefix begins without: its instance may have no room for a copy.
            attempt.cached = () if asked.prefix_failed else self._fleet.cached_tokens(asked)
            self.attempts.add(attempt)
            attempt.controlled = self._machine.arrive(attempt.request, self._clock(), attempt, attempt.cached)

    def retry(self, attempt: RequestAttempt, why: str, later: bool = False) -> None:
        """Drop a failed attempt and queue the next one.

        later: begin it after a pause, or as soon as membership changes; otherwise in the same settling.
        """
        log.info("%s: %s; it begins again with %d tokens said", attempt.request.id, why, len(attempt.asked.told))
        self._machine.drop(attempt.controlled, why, self._clock())
        attempt.asked.prefix_failed |= bool(attempt.prefix)
        self.retries.count(attempt)
        if later:
            self.retries.later(attempt.asked)
        else:
            self.retries.soon(attempt.asked)

    def gives_way(self) -> tuple[RequestAttempt, bool] | None:
        """Return the attempt to begin again so that the others can have their KV (`control.kv_reservations`), and
        whether that lets another go on; None: all can go on."""
        age = {name: number for number, name in enumerate(self.asked)}
        attempts = sorted(self.attempts, key=lambda attempt: age.get(attempt.asked.submit.id, -1))
        found = gives_way([kv_claim(attempt, self._fleet.kv_blocks) for attempt in attempts], self._fleet.kv.total)
        attempt = None if found is None else self.attempts.named(found[0])
        return None if found is None or attempt is None else (attempt, found[1])

    def begin_due(self) -> bool:
        """Begin the attempts that are due; return whether there were any."""
        begun = False
        for asked in self.retries.take():
            # The identity check: an id may be in use again.
            if not asked.over and self.asked.get(asked.submit.id) is asked:
                begun = True
                self.begin(asked)
        return begun

    def ended(self, attempt: RequestAttempt) -> None:
        """Forget a request whose last output, or error, has been sent."""
        self.asked.pop(attempt.asked.submit.id, None)

    @contextmanager
    def isolate(self, attempt: RequestAttempt | None, name: str) -> Iterator[None]:
        """Context in which an error fails its own request (HTTP 500) and nothing else.

        The error is the controller's, not that of the instance whose message is handled.
        """
        try:
            yield
        except Exception:
            log.exception("the controller has failed at %s", name)
            if attempt is not None:
                self.fail(attempt.asked, _own_failure())


def _own_failure() -> InvariantError:
    return InvariantError("the controller has failed at this request; its log says at what. Others go on")
