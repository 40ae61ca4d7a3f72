"""Cached prefixes under PecSched: requests are short or long, and weigh in queues, by what is not cached of them."""

from __future__ import annotations

from collections.abc import Sequence

from headway.core.request import Request
from headway.policy.placement.base import CachedPrefix, RequestArrived
from headway.policy.placement.pecsched.group_sizing import GroupSizing, StrategyChoice, StrategyChooser
from headway.policy.placement.pecsched.replica_index import ReplicaIndex
from headway.policy.placement.pecsched.short_requests import UNITS_A_SECOND, ShortRequest
from headway.policy.placement.prefix_reuse import (
    PrefixStart,
    cheapest_start,
    copy_pays,
    copy_seconds,
    longest_prefix,
)
from headway.policy.placement.registry import PolicyContext
from headway.policy.placement.view import ClusterSnapshot


class CachedPrefixes:
    """What instances had cached of each request when it arrived, and what follows for where it goes."""

    def __init__(self, context: PolicyContext, enabled: bool, counts_seconds: bool) -> None:
        """counts_seconds: the unit of queues (`QueueWeights`)."""
        self._context, self._enabled, self._counts_seconds = context, enabled, counts_seconds
        self._cached: dict[str, tuple[int, ...]] = {}
        self.view: ClusterSnapshot
        """Of the event that is handled; set with each one."""

    def note(self, event: RequestArrived) -> None:
        """Remember a new request's hits, if placements count them."""
        if self._enabled and event.cached:
            self._cached[event.request.id] = event.cached

    def forget(self, request: str) -> None:
        """Forget a request that has ended."""
        self._cached.pop(request, None)

    def uncached_tokens(self, request: Request) -> int:
        """Return the tokens behind a request's longest cached prefix."""
        return request.prompt_tokens - max(self._cached.get(request.id, ()), default=0)

    def is_long(self, request: Request, long_tokens: int, sizes: GroupSizing) -> bool:
        """Return whether the uncached tokens are more than `long_tokens`, or no replica alone holds the request."""
        if self.uncached_tokens(request) > long_tokens:
            return True
        whole = request.prompt_tokens + request.max_output_tokens
        return request.prompt_tokens > long_tokens and sizes.least(whole) > 1

    # -- short requests ---------------------------------------------------------------------------------------------

    def place(
        self, short: ShortRequest, chosen: int, ids: Sequence[int], replicas: ReplicaIndex, most: int | None
    ) -> tuple[int, CachedPrefix | None]:
        """Return the replica of a short request with the earliest end of its prefill, of `chosen` and those without a
        long request that have some of it cached, and the prefix behind which it begins there. Sets its weight.

        ids: instances of the replicas. most: tokens of a queue that it may join; None: any."""
        cached = self._cached.get(short.request.id)
        if cached is None:
            return chosen, None
        places = [chosen]
        if replicas.is_free(chosen):
            places += [
                at
                for at, i in enumerate(ids)
                if cached[i] and at != chosen and replicas.is_free(at)
                and (most is None or replicas.fits(at, short.request.prompt_tokens - cached[i], most))
            ]  # fmt: skip
        starts = {at: cheapest_start(short.request, cached, ids[at], self.view, self._context) for at in places}
        weights = {at: self._weight(short.request, start) for at, start in starts.items()}
        best = min(places, key=lambda at: (replicas.weight[at] + weights[at], at != chosen, at))
        short.weight, short.tokens = weights[best], max(1, short.request.prompt_tokens - starts[best].tokens)
        return best, starts[best].prefix

    def _weight(self, request: Request, start: PrefixStart) -> int:
        units = start.seconds * UNITS_A_SECOND if self._counts_seconds else request.prompt_tokens - start.tokens
        return max(1, round(units))

    # -- long requests ----------------------------------------------------------------------------------------------

    def choose(
        self, request: Request, group: Sequence[int], nodes: int, chooser: StrategyChooser
    ) -> tuple[StrategyChoice, CachedPrefix | None]:
        """Return the strategy of a long request on a group of instances, and the prefix behind which it begins if a
        copy to the group is faster than computing it again. Where instances copy none, one of the group has to have
        it."""
        whole = chooser.choose(request.prompt_tokens, len(group), nodes)
        copies = self._context.copies_prefixes
        longest = longest_prefix(self._cached.get(request.id, ()), None if copies else group)
        if longest is None:
            return whole, None
        copy_s = copy_seconds(longest.tokens, longest.instance, group, self.view, self._context)
        rest = chooser.choose(request.prompt_tokens, len(group), nodes, longest.tokens)
        if not copy_pays(copy_s, whole.prefill_s - rest.prefill_s):
            return whole, None
        # Without copies it is spread over the group as the span begins, as any earlier span's KV.
        return rest, CachedPrefix(longest.instance, longest.tokens, copy_s if copies else 0.0)
