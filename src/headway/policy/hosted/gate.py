"""vLLM's waiting queue behind a gate: `schedule()` sees only the requests that may be taken in this step.

vLLM's scan stops at the first request that gets no tokens (or, from 0.33 on, looks up the prefix cache for each that is
put aside). Behind the gate neither happens: the scan finds the policy's choice, in its order, and then an empty queue.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

VllmRequest = Any
"""`vllm.v1.request.Request`; not imported here, since nothing of it is needed but its identity."""


class GatedQueueMethods:
    """The methods of vLLM's `RequestQueue` over its own queue of all waiting requests; `scheduler` adds the base class.

    Truth value, peek and pop follow the gate; length, iteration, additions and removals are those of all requests, as
    metrics and aborts expect. An open gate is vLLM's own queue.
    """

    def __init__(self, everyone: Any) -> None:
        # vLLM's own queue, in vLLM's order.
        self._all = everyone
        # Requests that the scan may take, in the policy's order; None: the gate is open.
        self._visible: deque[VllmRequest] | None = None

    def show(self, requests: Iterable[VllmRequest]) -> None:
        """Close the gate for all but these, which must be in the queue. Called before each `schedule()`."""
        self._visible = deque(requests)

    def open(self) -> None:
        """Show everything in vLLM's order: no policy decides."""
        self._visible = None

    def add_request(self, request: VllmRequest) -> None:
        """A new request; not visible before the next `show`."""
        self._all.add_request(request)

    def pop_request(self) -> VllmRequest:
        """The first visible request leaves the queue."""
        if self._visible is None:
            return self._all.pop_request()
        request = self._visible.popleft()
        self._all.remove_request(request)
        return request

    def peek_request(self) -> VllmRequest:
        """The first visible request stays."""
        return self._all.peek_request() if self._visible is None else self._visible[0]

    def prepend_request(self, request: VllmRequest) -> None:
        """A preempted request; not visible before the next `show`."""
        self._all.prepend_request(request)

    def prepend_requests(self, requests: Iterable[VllmRequest]) -> None:
        """Requests that `schedule()` has put aside, which end its scan."""
        self._all.prepend_requests(requests)

    def remove_request(self, request: VllmRequest) -> None:
        """A request has ended while it waited."""
        self.remove_requests([request])

    def remove_requests(self, requests: Iterable[VllmRequest]) -> None:
        """Requests have ended while they waited; those that are not here are ignored."""
        gone = set(requests)
        self._all.remove_requests(gone)
        if self._visible is not None:
            self._visible = deque(r for r in self._visible if r not in gone)

    def __bool__(self) -> bool:
        return bool(self._all if self._visible is None else self._visible)

    def __getitem__(self, place: int) -> VllmRequest:
        """A request by its place among all: a first-come queue of vLLM's can be indexed."""
        return self._all[place]

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[VllmRequest]:
        return iter(self._all)
