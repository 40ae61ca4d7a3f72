"""A committed span while it runs in virtual time: what it takes, when it is due, where it can be paused."""

from __future__ import annotations

import math
from collections.abc import Sequence

from headway.control.queue_entries import SpanEntry
from headway.control.transfer_queue import KvSlice
from headway.core.span import Span
from headway.perf.latency.groups import GroupShape, batch_s
from headway.perf.latency.pause_points import PausePoints, pause_points_of
from headway.sim.cluster.balance import exposed_s
from headway.sim.cluster.spec import ClusterSpec


class SimulatedSpan:
    """The driver's part of an entry. `factor`: what is really taken over what was predicted (noise). late: pieces that
    have been sent but for what it has still to compute."""

    __slots__ = ("began_s", "due_s", "factor", "late", "serial")

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.began_s = -1.0
        self.due_s = math.inf
        self.serial = 0
        self.late: list[KvSlice] = []

    def pause_at(self, entry: SpanEntry, now: float, edges: PausePoints) -> tuple[float, int, int]:
        """(time, first token of the piece, layer) of the next edge of a run that began at `began_s`."""
        whole_s, begun = entry.predicted_s * self.factor, self.began_s + entry.extra_s
        if whole_s <= 0 or now <= begun:
            return max(now, begun), entry.tokens, entry.layer
        after_s, tokens, layer = edges.next_point(entry.tokens, entry.layer, now - begun, whole_s)
        return min(self.due_s, begun + after_s), tokens, layer


def edges(spec: ClusterSpec, span: Span, nodes: int) -> PausePoints:
    """Where a span can be paused."""
    shape = GroupShape(len(span.group), nodes, span.strategy)
    return pause_points_of(spec.spans, span.start, span.end, shape, spec.rows, spec.shape.layers)


def predicted_s(spec: ClusterSpec, spans: Sequence[Span], nodes: int, before: tuple[int, ...]) -> float:
    """Seconds of a span on its group, with what balancing the KV of earlier spans (on `before`) over it exposes; or of
    the spans of several requests as one batch."""
    first = spans[0]
    shape = GroupShape(len(first.group), nodes, first.strategy)
    if len(spans) > 1:
        return batch_s(spec.spans, ((span.start, span.end - span.start) for span in spans), shape)
    alone_s = spec.spans.prefill_s(first.start, first.end - first.start, shape)
    if not spec.balance or not before:
        return alone_s
    link = spec.links.inside if nodes == 1 else spec.links.across
    return alone_s + exposed_s(spec.shape, link, first.start, len(before), len(first.group), alone_s)
