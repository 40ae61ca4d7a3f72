"""A request in the simulated vLLM scheduler, and its waiting queue."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator

from headway.core.request import Request


class VllmRequestState:
    """Counters of one request, by the names of vLLM's own `Request`, which `policy.hosted` reads."""

    __slots__ = (
        "cached_tokens", "facts", "is_prefill_chunk", "lost_tokens", "num_computed_tokens", "num_in_flight_tokens",
        "num_output_placeholders", "num_output_tokens", "num_prompt_tokens", "num_stale_output_tokens", "num_tokens",
        "output_tokens", "request_id", "running",
    )  # fmt: skip

    def __init__(self, facts: Request, output_tokens: int) -> None:
        """`output_tokens`: after how many it stops, which the scheduler does not know; at most
        `facts.max_output_tokens`."""
        self.facts = facts
        self.request_id = facts.id
        self.num_prompt_tokens = self.num_tokens = facts.prompt_tokens
        self.output_tokens = output_tokens
        self.num_output_tokens = 0
        self.num_computed_tokens = 0
        """Tokens with KV, those of steps in flight included."""
        self.num_output_placeholders = 0
        """Output tokens that steps in flight will return (asynchronous scheduling)."""
        self.num_in_flight_tokens = 0
        self.num_stale_output_tokens = 0
        """Tokens in flight at the last preemption: their outputs count, their KV is gone."""
        self.is_prefill_chunk = False
        self.running = False
        self.lost_tokens = 0
        """Tokens computed before the last preemption, until the request resumes."""
        self.cached_tokens = facts.cached_tokens
        """Prompt tokens whose KV another request or server has, as the workload says."""

    @property
    def max_tokens(self) -> int:
        """Output that the client allows."""
        return self.facts.max_output_tokens

    @property
    def key(self) -> tuple[int, float, str]:
        """Place in a priority queue: priority, arrival, id."""
        return self.facts.priority, self.facts.arrival_s, self.request_id


class VllmWaitingQueue:
    """vLLM's waiting requests, first come first served or by priority; the methods are those of its `RequestQueue`."""

    def __init__(self, by_priority: bool) -> None:
        self._by_priority = by_priority
        self._requests: list[VllmRequestState] = []

    def add_request(self, request: VllmRequestState) -> None:
        """Add a request at its place, the end without priorities."""
        if self._by_priority:
            insort(self._requests, request, key=lambda r: r.key)
        else:
            self._requests.append(request)

    def prepend_request(self, request: VllmRequestState) -> None:
        """Add a request before all others; by priority at its place."""
        if self._by_priority:
            self.add_request(request)
        else:
            self._requests.insert(0, request)

    def prepend_requests(self, requests: Iterable[VllmRequestState]) -> None:
        """Prepend one after the other, so that the last is first."""
        for request in requests:
            self.prepend_request(request)

    def peek_request(self) -> VllmRequestState:
        """Return the first request."""
        return self._requests[0]

    def pop_request(self) -> VllmRequestState:
        """Remove and return the first request."""
        return self._requests.pop(0)

    def remove_request(self, request: VllmRequestState) -> None:
        """Remove a request."""
        self._requests.remove(request)

    def remove_requests(self, requests: Iterable[VllmRequestState]) -> None:
        """Remove those that are here."""
        gone = set(requests)
        self._requests = [request for request in self._requests if request not in gone]

    def __bool__(self) -> bool:
        return bool(self._requests)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[VllmRequestState]:
        return iter(self._requests)
