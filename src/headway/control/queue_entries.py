"""Entries of the instance queues: spans, and requests on their way to a scheduler (reservations need no type)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headway.control.instance_queues import QueueEntry
from headway.core.span import Phase, Span
from headway.policy.placement.base import SpanProgress

if TYPE_CHECKING:
    from headway.control.controlled_request import ControlledRequest


class SpanEntry(QueueEntry):
    """A committed span of a request, from its commit to its end, with the point from which it continues."""

    __slots__ = ("backend_state", "batch_leader", "batched_with", "began_s", "controlled", "extra_s", "index", "last",
                 "layer", "predicted_s", "resumed", "share", "span", "tokens")  # fmt: skip

    def __init__(
        self,
        controlled: ControlledRequest,
        span: Span,
        index: int,
        group: tuple[int, ...],
        predicted_s: float,
        after: SpanEntry | None = None,
        concurrent: bool = False,
    ) -> None:
        super().__init__("span", controlled.request.id, group, after, concurrent)
        # index: place among the request's committed spans
        self.controlled, self.span, self.index = controlled, span, index
        # the span ends the prompt: the first output token comes with it
        self.last = span.end == controlled.request.prompt_tokens
        # seconds of the whole span, uninterrupted
        self.predicted_s = predicted_s
        # where it continues: from `layer` on, for the tokens from `tokens` on
        self.layer, self.tokens = 0, span.start
        # elapsed share of its time at that point; None: the layers' share
        self.share: float | None = None
        # when it began or went on, seconds
        self.began_s = 0.0
        # seconds to restore its state when it resumes
        self.extra_s = 0.0
        # it has been paused: its group has its state
        self.resumed = False
        # of a batch, one entry is in the queues: it has the others here, and is their `batch_leader`
        self.batched_with: list[SpanEntry] = []
        self.batch_leader: SpanEntry | None = None
        # the backend's own state of it
        self.backend_state: Any = None

    def elapsed_share(self, layers: int) -> float:
        """Return the elapsed share of its predicted time at the point where it continues."""
        return self.layer / layers if self.share is None else self.share

    def remaining_s(self, layers: int) -> float:
        """Return the predicted seconds from the point where it continues."""
        return self.predicted_s * (1.0 - self.elapsed_share(layers)) + self.extra_s

    def progress(self) -> SpanProgress:
        """Return how much of it is computed; valid after a pause."""
        return SpanProgress(self.tokens, self.layer)


class SchedulerEntry(QueueEntry):
    """A request on its way to a scheduler."""

    __slots__ = ("controlled", "phase", "seconds", "tokens")

    def __init__(
        self, controlled: ControlledRequest, group: tuple[int, ...], phase: Phase, tokens: int, seconds: float
    ) -> None:
        super().__init__("scheduler", controlled.request.id, group)
        # tokens: prompt tokens to compute there. seconds: predicted time of these alone.
        self.controlled, self.phase, self.tokens, self.seconds = controlled, phase, tokens, seconds

    def remaining_s(self, layers: int) -> float:
        return self.seconds
