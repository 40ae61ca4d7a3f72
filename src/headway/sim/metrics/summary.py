"""Summaries of records: one for each class and one for the whole run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headway.sim.metrics import definitions as d
from headway.sim.metrics.quantiles import PERCENTILES, percentiles
from headway.sim.metrics.record import RequestRecord

SCHEMA = "headway.metrics/1"

Percentiles = dict[str, float | None]

_PER_REQUEST: dict[str, Callable[[RequestRecord], float | None]] = {
    "ttft_s": d.ttft_s,
    "tpot_s": d.tpot_s,
    "e2e_s": d.e2e_s,
    "queueing_s": d.queueing_s,
    "normalised_latency_s": d.normalised_latency_s,
}


@dataclass(frozen=True)
class ClassSummary:
    """One class of requests. Latencies are over successful requests only; failures are counted, by reason."""

    klass: str
    requests: int
    ok: int
    """Requests that succeeded."""
    good: int
    """Requests that succeeded and met all of their objectives."""
    prompt_tokens: int
    output_tokens: int
    latencies: dict[str, Percentiles]
    """Metric name → percentiles, seconds. `tbt_s` pools the gaps of all requests, so that a long answer weighs as much
    as its tokens; `max_tbt_s` takes one value for each request, its worst gap."""
    errors: dict[str, int] = field(default_factory=dict)
    """Failed requests by reason, the most frequent first."""

    @property
    def good_share(self) -> float | None:
        """Share of all requests, failed ones included, that were good; None without requests."""
        return self.good / self.requests if self.requests else None

    def to_json(self) -> dict[str, Any]:
        """Plain data for a JSON file."""
        return {
            "class": self.klass,
            "requests": self.requests,
            "ok": self.ok,
            "good": self.good,
            "good_share": self.good_share,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "errors": self.errors,
            **self.latencies,
        }


@dataclass(frozen=True)
class RunSummary:
    """A whole run."""

    duration_s: float
    """Denominator of rates: from the first arrival to the last end, or the window that the caller observed."""
    total: ClassSummary
    classes: tuple[ClassSummary, ...]
    """In order of first appearance."""

    def _rate(self, count: int) -> float | None:
        return count / self.duration_s if self.duration_s > 0 else None

    def to_json(self) -> dict[str, Any]:
        """Plain data for a JSON file, `schema` first."""
        total = self.total
        return {
            "schema": SCHEMA,
            "duration_s": self.duration_s,
            "request_throughput_rps": self._rate(total.ok),
            "goodput_rps": self._rate(total.good),
            "output_throughput_tps": self._rate(total.output_tokens),
            "total_throughput_tps": self._rate(total.output_tokens + total.prompt_tokens),
            "total": total.to_json(),
            "classes": [summary.to_json() for summary in self.classes],
        }


def error_reason(record: RequestRecord) -> str:
    """Return the reason that a failed request is counted under: its error up to the first colon."""
    return record.error.split(":", 1)[0] if record.error else "unfinished"


def summarise_class(
    klass: str,
    records: Sequence[RequestRecord],
    percents: Sequence[float] = PERCENTILES,
) -> ClassSummary:
    """Summarise these records as one class, whatever classes they name."""
    done = [record for record in records if record.ok]
    latencies = {name: percentiles(map(metric, done), percents) for name, metric in _PER_REQUEST.items()}
    # the gaps of `definitions.tbt_s`, as arrays: a run may have hundreds of millions of them
    gaps = [np.diff(np.asarray(record.token_s, dtype=np.float64)) for record in done]
    latencies["tbt_s"] = percentiles(np.concatenate(gaps) if gaps else (), percents)
    latencies["max_tbt_s"] = percentiles((float(mine.max()) if mine.size else None for mine in gaps), percents)
    return ClassSummary(
        klass=klass,
        requests=len(records),
        ok=len(done),
        good=sum(map(d.is_good, records)),
        # throughput counts the tokens of successful requests only
        prompt_tokens=sum(record.prompt_tokens for record in done),
        output_tokens=sum(record.output_tokens for record in done),
        latencies=latencies,
        errors=dict(Counter(error_reason(record) for record in records if not record.ok).most_common()),
    )


def summarise(
    records: Sequence[RequestRecord],
    *,
    duration_s: float | None = None,
    percents: Sequence[float] = PERCENTILES,
) -> RunSummary:
    """Summarise a run: one summary per class, in order of first appearance, and one over all.

    `duration_s` defaults to first arrival … last finish; a simulator with a window passes the window's length.
    """
    if duration_s is None:
        ends = [record.finish_s for record in records if record.finish_s is not None]
        duration_s = max(ends) - min(record.arrival_s for record in records) if ends else 0.0
    by_class: dict[str, list[RequestRecord]] = {}
    for record in records:
        by_class.setdefault(record.klass, []).append(record)
    return RunSummary(
        duration_s=duration_s,
        total=summarise_class("all", records, percents),
        classes=tuple(summarise_class(klass, mine, percents) for klass, mine in by_class.items()),
    )
