"""Definitions of TTFT, TBT, TPOT, goodput and percentiles, shared by the load client, the simulator and the reports.
Without torch and clocks: every figure is a function of `RequestRecord`s, whose times may come from any one clock.

Each returns None (or nothing) where the record cannot answer.

TTFT   time to first token: first token - arrival (when the request was due, not when a late client sent it).
TBT    time between tokens: the gaps between consecutive output tokens. A chunk of k tokens is one gap since the token
       before it and k - 1 gaps of zero: the gaps always sum to last - first, and batching tokens does not hide a stall.
TPOT   time per output token: (last token - first token) / (output tokens - 1), the mean TBT; needs two tokens.
E2E    finish - arrival.
queueing delay       first scheduled - arrival; recorded by the simulator, and for servers that report it.
normalised latency   E2E / output tokens.
good   a request is good if it succeeded and met all of its objectives; without objectives, if it succeeded.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headway.core.file_sections import FileSection, Seconds

PERCENTILES: tuple[float, ...] = (1, 25, 50, 75, 90, 99)


def percentile_name(percent: float) -> str:
    """Return the JSON key of a percentile: `50` → `p50`, `99.9` → `p99.9`."""
    return f"p{percent:g}"


def quantile(values: Sequence[float], percent: float) -> float | None:
    """Return the value below which `percent` per cent of the sample lies; None for an empty sample."""
    return float(np.percentile(np.asarray(values, dtype=float), percent)) if len(values) else None


def percentiles(values: Iterable[float | None]) -> dict[str, float | None]:
    """Return percentiles plus mean, min, max and n of the values that are not None; all None for an empty sample."""
    # an array has no None: no pass in Python over millions of gaps
    known = values if isinstance(values, np.ndarray) else [value for value in values if value is not None]
    sample = np.asarray(known, dtype=float)
    names = [percentile_name(percent) for percent in PERCENTILES]
    if sample.size == 0:
        return {"n": 0, "mean": None, "min": None, "max": None, **dict.fromkeys(names)}
    cuts = np.percentile(sample, PERCENTILES)
    body = {name: float(cut) for name, cut in zip(names, np.atleast_1d(cuts), strict=True)}
    return {
        "n": int(sample.size),
        "mean": float(sample.mean()),
        "min": float(sample.min()),
        "max": float(sample.max()),
        **body,
    }


class SloTargets(FileSection):
    """Targets of a class, in seconds; the scheduler gets the first two. tbt_s bounds every gap, tpot_s their mean."""

    ttft_s: Seconds | None = None
    tbt_s: Seconds | None = None
    tpot_s: Seconds | None = None
    e2e_s: Seconds | None = None

    def any(self) -> bool:
        """Return whether there is any objective."""
        return any(value is not None for value in (self.ttft_s, self.tbt_s, self.tpot_s, self.e2e_s))


NO_TARGETS = SloTargets()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request from arrival to end; built when it has ended, well or badly, or when a run stops observing it.

    All times are seconds on one clock, from the run's own zero.
    """

    id: str
    klass: str
    arrival_s: float
    """When the request was *due*: latencies count from there, so a client that falls behind makes them worse."""
    prompt_tokens: int
    output_tokens: int = 0
    """The server's own count where it gave one; may exceed `len(token_s)`."""
    sent_s: float | None = None
    """When the request was really sent."""
    scheduled_s: float | None = None
    """When the request was first scheduled, if recorded."""
    token_s: tuple[float, ...] = ()
    """One time for each output token that was seen, in order; tokens that arrive in one chunk share a time."""
    finish_s: float | None = None
    slo: SloTargets = NO_TARGETS
    finish_reason: str | None = None
    """The server's reason ("length", "stop", …) where the request succeeded."""
    error: str | None = None
    """None exactly when the request succeeded."""
    rejected: bool = False
    """The request was refused before it was scheduled."""
    text: str | None = None
    cached_tokens: int = 0
    """Tokens of the prompt that were not computed, because their KV was cached."""

    @property
    def ok(self) -> bool:
        """Whether the request ended and ended well."""
        return self.error is None and self.finish_s is not None

    @property
    def first_token_s(self) -> float | None:
        """When the first output token was there; None if none came."""
        return self.token_s[0] if self.token_s else None


def ttft_s(record: RequestRecord) -> float | None:
    """Return the time to the first token, seconds."""
    return record.token_s[0] - record.arrival_s if record.token_s else None


def tbt_s(record: RequestRecord) -> list[float]:
    """Return the gaps between consecutive tokens, seconds; empty with fewer than two tokens."""
    return [later - earlier for earlier, later in itertools.pairwise(record.token_s)]


def tpot_s(record: RequestRecord) -> float | None:
    """Return the mean time per output token after the first, seconds."""
    # the server's own count may exceed the chunks that were seen
    tokens = max(record.output_tokens, len(record.token_s))
    if tokens < 2 or not record.token_s:
        return None
    return (record.token_s[-1] - record.token_s[0]) / (tokens - 1)


def e2e_s(record: RequestRecord) -> float | None:
    """Return the time from arrival to finish, seconds."""
    return record.finish_s - record.arrival_s if record.finish_s is not None else None


def queueing_s(record: RequestRecord) -> float | None:
    """Return the time from arrival to first being scheduled, seconds; None where it was not recorded."""
    return record.scheduled_s - record.arrival_s if record.scheduled_s is not None else None


def normalised_latency_s(record: RequestRecord) -> float | None:
    """Return the end-to-end seconds per output token."""
    whole = e2e_s(record)
    return whole / record.output_tokens if whole is not None and record.output_tokens > 0 else None


def is_good(record: RequestRecord) -> bool:
    """Return whether the request succeeded and met every objective that it has.

    An objective that cannot be measured counts as missed (no token came), except that a request of one token has no
    gaps and so no way to miss a TBT or TPOT objective.
    """
    if not record.ok:
        return False
    slo = record.slo
    first, whole = ttft_s(record), e2e_s(record)
    if slo.ttft_s is not None and (first is None or first > slo.ttft_s):
        return False
    # every gap counts, so the worst one decides
    if slo.tbt_s is not None and max(tbt_s(record), default=0.0) > slo.tbt_s:
        return False
    # one token has no TPOT, and so cannot miss it
    if slo.tpot_s is not None and (tpot_s(record) or 0.0) > slo.tpot_s:
        return False
    return slo.e2e_s is None or (whole is not None and whole <= slo.e2e_s)


def request_row(record: RequestRecord) -> dict[str, Any]:
    """Return a request as tables, CSV and JSON have it: counts, latencies in seconds (None where there is none),
    verdict, error."""
    return {
        "id": record.id,
        "class": record.klass,
        "arrival_s": record.arrival_s,
        "prompt_tokens": record.prompt_tokens,
        "output_tokens": record.output_tokens,
        "queueing_s": queueing_s(record),
        "ttft_s": ttft_s(record),
        "tpot_s": tpot_s(record),
        "max_tbt_s": max(tbt_s(record), default=None),
        "e2e_s": e2e_s(record),
        "normalised_latency_s": normalised_latency_s(record),
        "good": is_good(record),
        "error": record.error,
        "cached_tokens": record.cached_tokens,
    }


SCHEMA = "headway.metrics/1"

Percentiles = dict[str, float | None]

_PER_REQUEST: dict[str, Callable[[RequestRecord], float | None]] = {
    "ttft_s": ttft_s,
    "tpot_s": tpot_s,
    "e2e_s": e2e_s,
    "queueing_s": queueing_s,
    "normalised_latency_s": normalised_latency_s,
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


def summarise_class(klass: str, records: Sequence[RequestRecord]) -> ClassSummary:
    """Summarise these records as one class, whatever classes they name."""
    done = [record for record in records if record.ok]
    latencies = {name: percentiles(map(metric, done)) for name, metric in _PER_REQUEST.items()}
    # the gaps of `definitions.tbt_s`, as arrays: a run may have hundreds of millions of them
    gaps = [np.diff(np.asarray(record.token_s, dtype=np.float64)) for record in done]
    latencies["tbt_s"] = percentiles(np.concatenate(gaps) if gaps else ())
    latencies["max_tbt_s"] = percentiles(float(mine.max()) if mine.size else None for mine in gaps)
    return ClassSummary(
        klass=klass,
        requests=len(records),
        ok=len(done),
        good=sum(map(is_good, records)),
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
        total=summarise_class("all", records),
        classes=tuple(summarise_class(klass, mine) for klass, mine in by_class.items()),
    )


def slowest(records: Iterable[RequestRecord], end_s: float | None = None) -> dict[str, Any] | None:
    """Return what is told of the request whose first token took longest, as plain data; None without any.

    end_s: when the run was cut off, on the records' clock; a request without a first token has then waited until there.
    """

    def waited(record: RequestRecord) -> float:
        first = ttft_s(record)
        if first is not None:
            return first
        return -1.0 if end_s is None or record.error is not None else end_s - record.arrival_s

    late = max((r for r in records if waited(r) >= 0.0), key=lambda r: (waited(r), r.id), default=None)
    if late is None:
        return None
    return {"id": late.id, "class": late.klass, "prompt_tokens": late.prompt_tokens, "ttft_s": ttft_s(late),
            "waited_s": waited(late), "queueing_s": queueing_s(late)}  # fmt: skip
