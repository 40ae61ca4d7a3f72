"""A committed span while it runs: what it takes, how far it is, where it can be paused."""

from __future__ import annotations

import math
from collections.abc import Sequence

from headway.core.span import Span
from headway.latency.groups import GroupLatency, GroupShape, batch_s
from headway.placement.base import Progress
from headway.simulator.cluster.balance import exposed_s
from headway.simulator.cluster.lanes import Entry
from headway.simulator.cluster.spec import ClusterSpec


class SpanRun:
    """`predicted_s`: of all of it; `factor`: what is really taken over that (noise). `layer`: where it goes on.

    Of a batch one entry is on the lanes; `along` are the others', and theirs have it as `lead`."""

    __slots__ = ("along", "began_s", "due_s", "extra_s", "factor", "index", "last", "layer", "lead", "predicted_s",
                 "serial", "span")  # fmt: skip

    def __init__(self, span: Span, index: int, last: bool, predicted_s: float, factor: float) -> None:
        self.span, self.index, self.last = span, index, last
        self.predicted_s, self.factor = predicted_s, factor
        self.layer = span.resume or 0
        self.extra_s = 0.0
        self.began_s = -1.0
        self.due_s = math.inf
        self.serial = 0
        self.along: list[Entry] = []
        self.lead: Entry | None = None

    def left_s(self, layers: int) -> float:
        """Predicted seconds from where it goes on."""
        return self.predicted_s * (1.0 - self.layer / layers) + self.extra_s

    def pause_at(self, now: float, layers: int) -> tuple[float, int]:
        """(time, layer) of the next layer edge of a run that began at `began_s`."""
        layer_s = self.predicted_s * self.factor / layers
        begun = self.began_s + self.extra_s
        if layer_s <= 0 or now <= begun:
            return max(now, begun), self.layer
        done = math.ceil((now - begun) / layer_s - 1e-9)
        layer = min(layers, self.layer + done)
        return min(self.due_s, begun + (layer - self.layer) * layer_s), layer

    def progress(self) -> Progress:
        """After a pause."""
        return Progress(self.span.start, self.layer)


def predicted_s(spec: ClusterSpec, latency: GroupLatency, span: Span, nodes: int, before: tuple[int, ...]) -> float:
    """Seconds of a span on its group, with what balancing the KV of earlier spans (on `before`) over it exposes."""
    alone_s = latency.prefill_s(span.start, span.end - span.start, GroupShape(len(span.group), nodes, span.strategy))
    if not spec.balance or not before:
        return alone_s
    link = spec.links.inside if nodes == 1 else spec.links.across
    return alone_s + exposed_s(spec.shape, link, span.start, len(before), len(span.group), alone_s)


def predicted_batch_s(spec: ClusterSpec, spans: Sequence[Span], nodes: int) -> float:
    """Seconds of the spans of several requests as one batch on their group."""
    shape = GroupShape(len(spans[0].group), nodes, spans[0].strategy)
    return batch_s(spec.spans, ((span.start, span.end - span.start) for span in spans), shape)
