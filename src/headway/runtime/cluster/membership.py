"""Membership of a live cluster: what happens when an instance joins, dies, drains, restarts, or cannot
reach another one.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations_with_replacement
from typing import TYPE_CHECKING, NamedTuple

from headway.control.controller import ClusterController
from headway.core.errors import ConfigError, UnavailableError
from headway.core.request import Request
from headway.policy.placement import contract
from headway.policy.placement.contract import ClusterInstance, ClusterSnapshot, ClusterState, PlacementPolicy
from headway.runtime.cluster.requests import ClusterRequests

if TYPE_CHECKING:
    from headway.runtime.cluster.http_backend import HttpBackend
    from headway.runtime.cluster.native_backend import LiveBackend

# Instances that run and cannot reach each other: found from lost spans and transfers, so that one of them is restarted.
#
# A cut connection is re-established by itself. Where that fails, everything that a policy gives to both ends is lost
# soon after it has begun; the two then look idle, and get more work. After three such losses without a success in
# between one end is restarted, then the other end; then one is given up, and the rest go on without it. An instance
# that reports failures of several requests as its own is treated in the same way.

LOSSES = 3
"""Losses on a link, without a success in between, after which one of its ends is restarted."""
_APART_S = 0.25
"""Losses less than so many seconds apart count as one: a cut ends everything under way on the link."""


class PeerVerdict(NamedTuple):
    """An instance that is to be restarted."""

    number: int
    for_good: bool
    """Whether to give it up instead: its restart did not help before."""


class _LinkHealth:
    """Losses between two instances, or of one instance by itself."""

    __slots__ = ("at_s", "ended", "losses", "requests")

    def __init__(self) -> None:
        # `at_s`: time of the last counted loss.
        self.losses, self.at_s = 0, float("-inf")
        self.requests: set[str] = set()
        """Requests that were lost on it."""
        self.ended: set[int] = set()
        """Ends that were restarted for it."""


class PeerHealth:
    """Attributes losses to instances of one cluster."""

    def __init__(self) -> None:
        self._links: dict[tuple[int, int], _LinkHealth] = {}
        self._ending: set[int] = set()

    def lost(self, here: int, by: int, request: str, now: float) -> PeerVerdict | None:
        """Count a loss that instance `here` attributes to instance `by` (or itself); return the one to restart."""
        ends = (min(here, by), max(here, by))
        # One end is being restarted already: what is lost until it is gone has the same cause.
        if self._ending.intersection(ends):
            return None
        link = self._links.setdefault(ends, _LinkHealth())
        # An instance that fails by itself is suspect only with several requests: one may be to blame itself.
        if now - link.at_s < _APART_S or (here == by and request in link.requests):
            return None
        link.at_s = now
        link.losses += 1
        link.requests.add(request)
        if link.losses < LOSSES:
            return None
        # First an end that was not restarted for this link, then the one with more losses on all its links.
        number = max(set(ends), key=lambda end: (end not in link.ended, self._losses(end), end))
        verdict = PeerVerdict(number, number in link.ended)
        link.ended.add(number)
        self._ending.add(number)
        return verdict

    def worked(self, group: Iterable[int]) -> None:
        """Clear the losses between all pairs of a group whose task or transfer succeeded."""
        if self._links:
            for ends in combinations_with_replacement(sorted(group), 2):
                self._links.pop(ends, None)

    def gone(self, number: int) -> bool:
        """Start counting from zero for a lost instance's links; return whether `lost` had named it for a restart."""
        # `ended` is kept: a second verdict on the same end is final.
        for ends, link in self._links.items():
            if number in ends:
                link.losses = 0
                link.requests.clear()
        said = number in self._ending
        self._ending.discard(number)
        return said

    def _losses(self, end: int) -> int:
        return sum(link.losses for ends, link in self._links.items() if end in ends)


log = logging.getLogger("headway.cluster")


class ClusterMembership:
    """The controller's instances, as membership and failures change them."""

    def __init__(
        self,
        controller: ClusterController,
        cluster: ClusterState,
        backend: LiveBackend | HttpBackend,
        make: Callable[[], PlacementPolicy],
        longest: Callable[[Sequence[ClusterInstance]], int],
        requests: ClusterRequests,
        settle: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        """cluster: what policies see. make: returns a new policy. longest: see `ClusterRules`. settle: lets the
        controller act."""
        self._controller, self._cluster, self._backend = controller, cluster, backend
        self._registry = backend.registry
        self._make, self._longest, self._requests = make, longest, requests
        self._settle, self._clock = settle, clock
        self.unable_s = math.inf
        """Since when no request can be placed; infinity: requests can be placed."""
        self.leaving: set[int] = set()
        """Instances that are drained, until no request has work or KV on them."""

    # -- reports ------------------------------------------------------------------------------------------------------

    @property
    def patience_s(self) -> float:
        """Seconds for Retry-After: until the first instance is expected to be free, between 1 and 30."""
        now = self._clock()
        free = [self._cluster.instances[number].free_at_s - now for number in self._there()]
        return min(30.0, max(1.0, min(free, default=1.0)))

    def placed(self) -> Counter[int]:
        """Count, for each instance, the requests that have or will have work or KV there."""
        planned = self._controller.state.everywhere()
        attempts = self._requests.attempts
        return Counter(i for each in attempts for i in each.places() | planned.get(each.request.id, set()))

    def figures(self, number: int) -> tuple[int, float]:
        """Return an instance's uncomputed prompt tokens, and the predicted seconds until they are computed."""
        seen = self._cluster.instances[number] if self._sees(number) else self._backend.refresh(number)
        return round(seen.queued), max(0.0, seen.free_at_s - self._clock())

    def quiet(self, number: int) -> bool:
        """Whether no request has or will have work or KV on an instance."""
        if self._sees(number) and not self._controller.quiet(number):
            return False
        return not any(number in each.places() for each in self._requests.attempts)

    def others(self, number: int) -> list[int]:
        """Return the ready, not draining instances but for one."""
        return [one for one in self._there() if one != number]

    def _there(self) -> list[int]:
        there = [each for each in self._registry if each.state == "ready" and each.seen]
        return [each.number for each in there if each.number not in self.leaving]

    def _sees(self, number: int) -> bool:
        """Whether policies see an instance; the numbers of those that they do not see are the highest."""
        return number < len(self._cluster.instances)

    # -- membership ---------------------------------------------------------------------------------------------------

    def joined(self, number: int) -> None:
        """See `InstanceEvents`."""
        log.info("instance %d is ready", number)
        if self._sees(number):
            self._controller.open(self._registry[number].initial_instance, self._clock())
        self.renew()

    def lost(self, number: int, why: str) -> None:
        """See `InstanceEvents`."""
        # Taken before the controller forgets the instance, which also ends attempts.
        known = {attempt.request.id: attempt for attempt in self._requests.attempts}
        on_it = [attempt for attempt in known.values() if number in attempt.places()]
        if on_it or self._registry[number].state != "left":
            log.warning("instance %d is lost: %s", number, why)
        else:
            log.info("instance %d has left", number)
        # A restart that `PeerHealth` asked for says nothing about the requests that were there.
        innocent = self._backend.lost(number)
        retries = self._requests.retries
        # The controller has dropped these itself; the others with anything there are dropped by `retry` below.
        for request in self._controller.lost(number, self._clock()) if self._sees(number) else ():
            retries.count(known[request.id])
            retries.soon(known[request.id].asked)
        for attempt in on_it:
            if not attempt.controlled.ended:
                self._requests.retry(attempt, why)
            if not innocent and (error := retries.lost_with(attempt.asked)) is not None:
                self._requests.fail(attempt.asked, error)
        self.leaving.discard(number)
        self.renew()

    def close(self, number: int) -> None:
        """Place nothing new on an instance; `quiet` tells when nothing is left there."""
        if self._sees(number):
            self._controller.close(number, self._clock())
        self.leaving.add(number)
        self.renew()

    def end_drained(self) -> None:
        """End the drained instances on which nothing is left."""
        for number in list(self.leaving):
            if self.quiet(number):
                self.leaving.discard(number)
                self._registry[number].drain()

    def reserve(self, number: int) -> None:
        """Extend the cluster state by an instance that is starting under a new number."""
        if number == len(self._cluster.instances):
            self._controller.reserve(self._registry[number].initial_instance)

    def renew(self) -> None:
        """Let the controller act on a change of membership, which its policies hear of."""
        # Peers meet before anything is placed: a span needs its group's connections.
        self._backend.meet()
        requests = self._requests
        requests.not_placeable = self.refuses(self._there())
        if requests.not_placeable is None:
            self.unable_s = math.inf
        elif self.unable_s == math.inf:
            self.unable_s = self._clock()
        requests.longest = self._held(self._there())
        requests.retries.release(requests.not_placeable is None)
        self._settle()

    def _held(self, numbers: Iterable[int]) -> int:
        """Return the tokens of the longest request that these instances hold; 0: not limited."""
        return self._longest([self._registry[number].initial_instance for number in numbers])

    def shortens(self, number: int, served: int) -> str | None:
        """Return why requests of up to `served` tokens would not fit without an instance; None: they would."""
        longest = self._held(self.others(number))
        if 0 < longest < served:
            return f"the others hold requests of up to {longest} tokens, and such of up to {served} are accepted"
        return None

    def fail_too_long(self) -> None:
        """Fail the requests that wait for a group which the instances that are there, or will be, cannot make."""
        coming = [each.number for each in self._registry if each.state in ("starting", "ready", "lost")]
        if (longest := self._held(coming)) == 0:
            return
        for asked in list(self._requests.asked.values()):
            if asked.tokens > longest:
                why = f"the instances that are left hold requests of up to {longest} tokens, and it has {asked.tokens}"
                self._requests.fail(asked, UnavailableError(why, 30.0))

    def refuses(self, there: Sequence[int]) -> str | None:
        """Return why the policy cannot place requests on these instances alone; None: it can."""
        if not there:
            return "no instance is there"
        # A copy of the state and a policy of its own: the probe request leaves no trace.
        cluster = ClusterState(self._cluster.instances, self._cluster.links)
        for i in set(range(len(cluster.instances))) - set(there):
            cluster.remove(i)
        probe = Request(id="", arrival_s=0.0, prompt_tokens=1, max_output_tokens=2)
        try:
            self._make().on_event(contract.RequestArrived(probe), ClusterSnapshot(cluster, 0.0))
        except (ConfigError, ValueError, IndexError) as error:
            return str(error)
        return None
