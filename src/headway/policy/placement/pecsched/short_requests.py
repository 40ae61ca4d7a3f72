"""Short requests under PecSched: on the replica of their prefill, then on a decode instance."""

from __future__ import annotations

from collections.abc import Sequence

from headway.core.request import Request
from headway.perf.latency.groups import GroupLatency, GroupShape
from headway.policy.placement.pecsched.argmin import HeapArgMin

UNITS_A_SECOND = 1e6
"""Queues that count seconds are whole microseconds."""


class ShortRequest:
    """A short request until it decodes elsewhere or ends."""

    __slots__ = ("replica", "request", "tokens", "weight")

    def __init__(self, request: Request, weight: int) -> None:
        self.request = request
        self.weight = weight  # of its prefill, in the unit of queues
        self.tokens = request.prompt_tokens  # of its prefill, without cached ones once it is placed
        self.replica = -1  # -1: in the global queue


class QueueWeights:
    """What prompts add to a replica's queue: their tokens, or their predicted prefill times."""

    def __init__(self, latency: GroupLatency, counts_seconds: bool) -> None:
        self._latency, self._counts_seconds = latency, counts_seconds
        self._known: dict[int, int] = {}  # by prompt tokens

    def weight(self, tokens: int) -> int:
        """Return what a prompt of `tokens` adds to a queue, in the unit of queues."""
        if not self._counts_seconds:
            return tokens
        weight = self._known.get(tokens)
        if weight is None:
            seconds = self._latency.prefill_s(0, tokens, GroupShape(1))
            # at least 1: a queue of weight 0 counts as idle
            weight = self._known[tokens] = max(1, round(seconds * UNITS_A_SECOND))
        return weight


class DecodeInstances:
    """Instances of role decode, and the short requests that decode on them."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = ids
        self._load = [0] * len(ids)  # tokens of the requests on each
        self._least_loaded = HeapArgMin(len(ids))
        self._requests: dict[str, tuple[int, int]] = {}  # (place in `ids`, tokens), by request id
        for at in range(len(ids)):
            self._least_loaded.update(at, 0)

    def __contains__(self, name: str) -> bool:
        return name in self._requests

    def place(self, request: Request) -> int:
        """Give a request to the instance with the fewest tokens, and return its id."""
        at = self._least_loaded.argmin()
        # the KV that it will have at most
        tokens = request.prompt_tokens + request.max_output_tokens
        self._add(at, tokens)
        self._requests[request.id] = (at, tokens)
        return self._ids[at]

    def remove(self, name: str) -> bool:
        """Remove a request that has ended. False: it is on none of these instances."""
        where = self._requests.pop(name, None)
        if where is not None:
            self._add(where[0], -where[1])
        return where is not None

    def _add(self, at: int, tokens: int) -> None:
        self._load[at] += tokens
        self._least_loaded.update(at, self._load[at])
