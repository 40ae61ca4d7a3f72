"""Metrics by class of request: latencies, and objectives that clients asked for, met and missed."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram

from headway.core.request import Slo
from headway.serving.generation_record import GenerationRecord

_MOST_CLASSES = 16
"""Names of clients' own, after which a new one counts under "other": each name costs a hundred series."""


class ClassMetrics:
    """Latency histograms and SLO counters, each with the label `class`.

    A class is what the request's `class` says, else `long` for prompts above `EngineInfo.long_tokens`, else `short`.
    """

    def __init__(self, prefix: str, registry: CollectorRegistry, long: Sequence[float], short: Sequence[float]) -> None:
        """long, short: buckets in seconds of whole requests and of single tokens."""

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(prefix + name, text, ("class",), buckets=buckets, registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(prefix + name, text, ("class", *labels), registry=registry)

        self._first = histogram(
            "class_time_to_first_token_seconds", "From reception to the first output token, by class.", long
        )
        self._gap = histogram("class_inter_token_latency_seconds", "Between two output tokens, by class.", short)
        self._worst = histogram("class_worst_gap_seconds", "A request's longest time between two tokens.", short)
        self._asked = counter("slo_requests_asked", "Requests that asked for a latency.")
        self._met = counter("slo_requests_met", "Requests that got all the latencies that they asked for.")
        self._missed = counter("slo_requests_missed", "Requests that missed a latency that they asked for.")
        self._targets = counter("slo_targets_missed", "Latencies asked for and missed: ttft, tpot.", "target")
        self._named: set[str] = set()
        self.met_total = self.missed_total = 0
        # The two classes of the server's own are there from the start, so that rates are defined before a request.
        for each in ("short", "long"):
            for metric in (self._first, self._gap, self._worst, self._asked, self._met, self._missed):
                metric.labels(each)
            for target in ("ttft", "tpot"):
                self._targets.labels(each, target)

    def label(self, request_class: str) -> str:
        """Return the label of a class: its name, or "other" for names beyond the first few."""
        if request_class in ("short", "long") or request_class in self._named:
            return request_class
        if len(self._named) >= _MOST_CLASSES:
            return "other"
        self._named.add(request_class)
        return request_class

    def asked(self, request_class: str, slo: Slo) -> None:
        """Count an accepted request, if it asks for a latency."""
        if slo != Slo():
            self._asked.labels(request_class).inc()

    def first(self, request_class: str, seconds: float) -> None:
        """Add a time to first token."""
        self._first.labels(request_class).observe(seconds)

    def gap(self, request_class: str, seconds: float, tokens: int) -> None:
        """Add the time before a delta of `tokens` tokens, which share it."""
        gaps = self._gap.labels(request_class)
        for _ in range(tokens):
            gaps.observe(seconds / tokens)

    def finished(self, record: GenerationRecord) -> None:
        """Add an ended request."""
        name = record.request_class
        if record.output_tokens > 1:
            self._worst.labels(name).observe(record.worst_gap_s)
        objectives = record.objectives()
        if not objectives:
            return
        if all(objectives.values()):
            self.met_total += 1
            self._met.labels(name).inc()
            return
        self.missed_total += 1
        self._missed.labels(name).inc()
        for target, met in objectives.items():
            if not met:
                self._targets.labels(name, target).inc()
