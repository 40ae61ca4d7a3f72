"""Spans in virtual time: predicted duration, due time and pause points."""

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
from headway.sim.result import SpanWork


def count_work(work: SpanWork, spec: ClusterSpec, span: Span, share: float) -> None:
    """Add a share of one span's work."""
    rows, size = span.end - span.start, len(span.group)
    pieces = math.ceil(rows / (size * spec.rows)) if spec.rows else 1
    work.tokens += share * rows
    # Row r of the prompt attends to r + 1 tokens.
    work.attention_pairs += share * rows * (span.start + span.end + 1) / 2
    # Each instance of the group reads what its rows attend to; a piece attends to all up to its own end.
    work.kv_read_tokens += share * size * (pieces * span.start + rows * (pieces + 1) / 2)
    work.passes += share * size * pieces


class SimulatedSpan:
    """The simulator's state of a queue entry."""

    __slots__ = ("began_s", "deferred", "due_s", "factor", "serial")

    def __init__(self, factor: float) -> None:
        self.factor = factor
        """Simulated time over predicted time (noise)."""
        self.began_s = -1.0
        """Start of its current stretch, virtual seconds; a pause ends a stretch."""
        self.due_s = math.inf
        """Virtual seconds at which it ends or pauses."""
        self.serial = 0
        """Number of starts, pauses and stops so far: scheduled ends that carry another number are stale."""
        self.deferred: list[KvSlice] = []
        """KV slices that are sent at the end of this span."""

    def computed_share(self, entry: SpanEntry, now: float) -> float:
        """Return the share of the span that its present stretch has computed by now."""
        whole_s = entry.predicted_s * self.factor
        return max(0.0, (now - self.began_s - entry.extra_s) / whole_s) if whole_s > 0 else 1.0

    def next_pause(self, entry: SpanEntry, now: float, points: PausePoints) -> tuple[float, int, int]:
        """Return (time, first token of the piece, layer) of the next pause point after `now`."""
        whole_s, begun = entry.predicted_s * self.factor, self.began_s + entry.extra_s
        # nothing is computed yet in this stretch: pause where it would begin
        if whole_s <= 0 or now <= begun:
            return max(now, begun), entry.tokens, entry.layer
        after_s, tokens, layer = points.next_point(entry.tokens, entry.layer, now - begun, whole_s)
        return min(self.due_s, begun + after_s), tokens, layer


def pause_points(spec: ClusterSpec, span: Span, nodes: int) -> PausePoints:
    """Return the pause points of a span on a group that spreads over `nodes` nodes."""
    shape = GroupShape(len(span.group), nodes, span.strategy)
    return pause_points_of(spec.spans, span.start, span.end, shape, spec.rows, spec.shape.layers)


def predicted_s(spec: ClusterSpec, spans: Sequence[Span], nodes: int, before: tuple[int, ...]) -> float:
    """Return the seconds of a span on its group, or of the spans of several requests as one batch.

    A single span also pays for what balancing the KV of earlier spans (on `before`) over its group exposes.
    """
    first = spans[0]
    shape = GroupShape(len(first.group), nodes, first.strategy)
    if len(spans) > 1:
        return batch_s(spec.spans, ((span.start, span.end - span.start) for span in spans), shape)
    alone_s = spec.spans.prefill_s(first.start, first.end - first.start, shape)
    if not spec.balance or not before:
        return alone_s
    # the slowest link of the group carries the balancing
    link = spec.links.inside if nodes == 1 else spec.links.across
    return alone_s + exposed_s(spec.shape, link, first.start, len(before), len(first.group), alone_s)
