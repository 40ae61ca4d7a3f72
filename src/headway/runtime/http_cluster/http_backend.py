"""The controller's backend over HTTP instances: a request enters an instance as one streamed completion.

A pause closes the stream; what was computed stays in the instance's prefix cache, if it has one, and the next stream
finds it there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from headway.control.backend import ActionImpossible, InstanceBackend, SchedulerStats
from headway.control.controlled_request import ControlledRequest
from headway.control.queue_entries import SpanEntry
from headway.control.transfer_queue import KvSlice
from headway.core.request import Request
from headway.core.span import Phase, Span
from headway.policy.placement.capabilities import HTTP_CAPABILITIES
from headway.runtime.http_cluster.http_instance import HttpInstance
from headway.runtime.http_cluster.http_request import HttpRequest
from headway.runtime.http_cluster.prefill_queue import LearnedLatency

Start = Callable[[HttpRequest, int], None]
"""Opens a request's stream to an instance."""


class HttpBackend(InstanceBackend):
    """See the module. `HttpCluster` empties `paused`, `done` and `rejected` after each call of the controller."""

    capabilities = HTTP_CAPABILITIES

    def __init__(
        self,
        instances: Mapping[int, HttpInstance],
        latency: LearnedLatency,
        start: Start,
        clock: Callable[[], float],
    ) -> None:
        self._instances, self._latency, self._start, self._clock = instances, latency, start, clock
        self.paused: list[tuple[SpanEntry, float]] = []
        """Spans whose streams were closed for a pause, with the share of their time that had gone by."""
        self.done: list[HttpRequest] = []
        """Requests that had ended when the policy enqueued their decode."""
        self.rejected: list[tuple[HttpRequest, str]] = []
        """Requests that the policy refused, with the reason."""

    # -- predictions --------------------------------------------------------------------------------------------------

    def span_s(self, spans: Sequence[Span], nodes: int, before: tuple[int, ...]) -> float:
        if len(spans) > 1:
            raise ActionImpossible("HTTP instances make their own batches")
        span = spans[0]
        if self._instances[span.group[0]].state != "ready":
            raise ActionImpossible(f"instance {span.group[0]} is not there")
        return self._latency.prompt_s(span.group[0], span.end - span.start)

    def prefill_estimate(self, request: Request, group: tuple[int, ...]) -> tuple[int, float]:
        tokens = request.prompt_tokens - request.cached_tokens
        return tokens, self._latency.prompt_s(group[0], tokens)

    def busy_s(self, group: tuple[int, ...]) -> float:
        now = self._clock()
        left_s = max(self._instances[i].queue.left_s(now) for i in group)
        return now + left_s if left_s else 0.0

    def refresh(self, instance: int) -> SchedulerStats:
        there, now = self._instances[instance], self._clock()
        queue, load = there.queue, there.load
        left_s = queue.left_s(now)
        # Others may use the server too: its own count has their requests.
        running = max(queue.requests, load.running + load.waiting)
        used = round(load.kv_usage * load.kv_tokens)
        return SchedulerStats(now + left_s if left_s else 0.0, queue.queued_tokens, used, running)

    # -- actions ------------------------------------------------------------------------------------------------------

    def begin(self, entry: SpanEntry, now: float) -> None:
        request: HttpRequest = entry.controlled.backend_state
        request.entry = entry
        self._start(request, entry.group[0])

    def pause(self, entry: SpanEntry, now: float) -> None:
        request: HttpRequest = entry.controlled.backend_state
        if request.stream is None or request.stream.first:
            raise ActionImpossible(f"{entry.owner} has its first token")
        began_s, before = request.stream.sent_s, entry.elapsed_share(1)
        self._stop(request)
        request.life.pause()
        # How far it has come the instance does not say: as far as its predicted time goes, and never to the end.
        gone = (now - began_s) / max(entry.predicted_s, 1e-9)
        self.paused.append((entry, min(0.95, before + gone)))

    def stop(self, entry: SpanEntry, now: float) -> None:
        """Do nothing: the request is forgotten next, which closes its stream."""

    def enter(self, controlled: ControlledRequest, group: tuple[int, ...], phase: Phase, now: float) -> None:
        request: HttpRequest = controlled.backend_state
        if request.life.over:
            self.done.append(request)
            return
        if request.stream is not None:
            # A decode goes on in the stream of its prefill, unless it is to go on elsewhere: then it is computed again.
            if request.stream.instance == group[0]:
                return
            self._stop(request)
            request.life.pause()
        self._start(request, group[0])

    def leave(self, controlled: ControlledRequest, why: str, now: float) -> int:
        request: HttpRequest = controlled.backend_state
        if why == "moved" and not request.life.over:
            self._stop(request)
            request.life.pause()
        return request.attempt_tokens

    def send(self, kv_slice: KvSlice, now: float) -> None:
        """Never called: `capabilities` has no KV transfer."""
        raise ActionImpossible("HTTP instances move no KV")

    def forget(self, controlled: ControlledRequest, why: str | None, now: float) -> bool:
        request: HttpRequest = controlled.backend_state
        self._stop(request)
        for each in self._instances.values():
            each.queue.remove(controlled.request.id, now)
        if why is not None and controlled.rejected:
            self.rejected.append((request, why))
        return False

    def pump(self, now: float) -> None:
        """Do nothing: servers continue by themselves."""

    def _stop(self, request: HttpRequest) -> None:
        """Close a request's stream, if it has one."""
        stream, request.stream = request.stream, None
        if stream is not None:
            stream.close()
            self._instances[stream.instance].queue.remove(request.name, self._clock())
            if stream.prefill is not None:
                stream.prefill.queue.remove(request.name, self._clock())
