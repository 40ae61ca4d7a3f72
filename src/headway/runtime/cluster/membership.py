"""Membership of a live cluster: what happens when an instance joins, dies, drains, restarts, or cannot reach another
one, and how placement policies are replaced with it.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations_with_replacement
from typing import TYPE_CHECKING, NamedTuple

from typing_extensions import override

from headway.control.controller import ClusterController
from headway.core.errors import ConfigError, UnavailableError
from headway.core.request import Request
from headway.policy.placement.contract import (
    Action,
    ClusterSnapshot,
    ClusterState,
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
from headway.runtime.cluster.requests import ClusterRequests

if TYPE_CHECKING:
    from headway.runtime.cluster.driver import ClusterRules
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
        backend: LiveBackend | HttpBackend,
        rules: ClusterRules,
        requests: ClusterRequests,
        settle: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        """settle: lets the controller act."""
        self._controller, self._cluster, self._backend = controller, controller.cluster, backend
        self._registry, self._rules, self._requests = backend.registry, rules, requests
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
        """See `InstanceRoster`."""
        log.info("instance %d is ready", number)
        if self._sees(number):
            self._controller.open(self._registry[number].initial_instance, self._clock())
        self.renew()

    def lost(self, number: int, why: str) -> None:
        """See `InstanceRoster`."""
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
        return self._rules.longest([self._registry[number].initial_instance for number in numbers])

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
            self._rules.policy().on_event(RequestArrived(probe), ClusterSnapshot(cluster, 0.0))
        except (ConfigError, ValueError, IndexError) as error:
            return str(error)
        return None


class PlacementChain(PlacementPolicy):
    """A `PlacementPolicy` made of several: each request belongs to the one that was the newest at its arrival.

    Policies keep state about instances: groups, queues, reservations. They hear of a change of membership and need not
    handle it: a new policy is made from the present instances, and gets all new requests. The older ones continue with
    the requests that they have placed, until the last of these has ended; the driver lets those that they had not
    placed arrive again (`unplaced`)."""

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
