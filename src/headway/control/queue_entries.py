"""What stands in lanes besides holds: spans, and requests on their way to a scheduler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headway.control.instance_queues import QueueEntry
from headway.core.span import Phase, Span
from headway.policy.placement.base import SpanProgress

if TYPE_CHECKING:
    from headway.control.request import ControlledRequest


class SpanEntry(QueueEntry):
    """A committed span. `last`: it ends the prompt. predicted_s: of all of it; layer: where it goes on, of the tokens
    from `tokens` on; share: of its time that is over with that (None: as of its layers); extra_s: what restoring its
    state takes; resumed: it has been paused, and goes on from there.

    Of a batch one entry is on the lanes; `along` are the others', and theirs have it as `lead`. `driver`: whatever the
    hands keep of it."""

    __slots__ = ("along", "driver", "extra_s", "index", "journey", "last", "layer", "lead", "predicted_s", "resumed",
                 "share", "span", "tokens")  # fmt: skip

    def __init__(
        self,
        journey: ControlledRequest,
        span: Span,
        index: int,
        group: tuple[int, ...],
        predicted_s: float,
        after: SpanEntry | None = None,
        beside: bool = False,
    ) -> None:
        super().__init__("span", journey.request.id, group, after, beside)
        self.journey, self.span, self.index = journey, span, index
        self.last = span.end == journey.request.prompt_tokens
        self.predicted_s = predicted_s
        self.layer, self.tokens = 0, span.start
        self.share: float | None = None
        self.extra_s = 0.0
        self.resumed = False
        self.along: list[SpanEntry] = []
        self.lead: SpanEntry | None = None
        self.driver: Any = None

    def over(self, layers: int) -> float:
        """The share of its time that is over where it goes on."""
        return self.layer / layers if self.share is None else self.share

    def left_s(self, layers: int) -> float:
        """Predicted seconds from where it goes on."""
        return self.predicted_s * (1.0 - self.over(layers)) + self.extra_s

    def progress(self) -> SpanProgress:
        """After a pause."""
        return SpanProgress(self.tokens, self.layer)


class SchedulerEntry(QueueEntry):
    """A request on its way to a scheduler: its prompt's tokens, and the seconds that they take alone there."""

    __slots__ = ("journey", "phase", "seconds", "tokens")

    def __init__(
        self, journey: ControlledRequest, group: tuple[int, ...], phase: Phase, tokens: int, seconds: float
    ) -> None:
        super().__init__("door", journey.request.id, group)
        self.journey, self.phase, self.tokens, self.seconds = journey, phase, tokens, seconds

    def left_s(self, layers: int) -> float:
        return self.seconds
