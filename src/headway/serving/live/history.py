"""Latencies and loads of the last minutes in buckets of a few seconds: bounded, whatever the rate of requests."""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field

BUCKET_S = 2.0
MOST_BUCKETS = 450
"""15 minutes."""
_STEP = math.log(1.1)
"""Durations are counted in classes 10% apart: percentiles are off by 5% at most."""
_SHORTEST_S, _LONGEST_S = 1e-4, 1e5


class DurationHistogram:
    """Counts of durations in classes that grow by 10%: at most 218 of them."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def add(self, seconds: float, count: int = 1) -> None:
        """Add a duration so many times."""
        self._counts[round(math.log(min(max(seconds, _SHORTEST_S), _LONGEST_S)) / _STEP)] += count

    def merge(self, other: DurationHistogram) -> None:
        """Add the other's durations."""
        self._counts.update(other._counts)

    def quantile(self, share: float) -> float | None:
        """Return the duration below which this share lies, within 5%; None of nothing."""
        left = share * self._counts.total()
        for index in sorted(self._counts):
            left -= self._counts[index]
            if left <= 0:
                return math.exp(index * _STEP)
        return None


@dataclass
class HistoryBucket:
    """What happened within `BUCKET_S` seconds."""

    number: int
    """Its start, in units of `BUCKET_S` on the feed's clock."""
    ttft: DurationHistogram = field(default_factory=DurationHistogram)
    gaps: DurationHistogram = field(default_factory=DurationHistogram)
    met: int = 0
    missed: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    kv_share: float | None = None
    waiting: int = 0
    running: int = 0

    def row(self) -> list[float | int | None]:
        """Return it as the page has it: start, TTFT and TBT (median, P99), KV share, waiting, running, tokens a second
        of prefill and decode, met, missed."""
        times = [self.ttft.quantile(0.5), self.ttft.quantile(0.99), self.gaps.quantile(0.5), self.gaps.quantile(0.99)]
        rates = [self.prefill_tokens / BUCKET_S, self.decode_tokens / BUCKET_S]
        loads = [self.kv_share, self.waiting, self.running]
        return [self.number * BUCKET_S, *times, *loads, *rates, self.met, self.missed]


class LatencyHistory:
    """The last `MOST_BUCKETS` buckets in which anything happened."""

    def __init__(self) -> None:
        self._buckets: deque[HistoryBucket] = deque(maxlen=MOST_BUCKETS)

    def at(self, now: float) -> HistoryBucket:
        """Return the bucket of a time; a time before the newest bucket belongs to the newest."""
        number = int(now // BUCKET_S)
        if not self._buckets or number > self._buckets[-1].number:
            self._buckets.append(HistoryBucket(number))
        return self._buckets[-1]

    def rows(self, since: int) -> list[list[float | int | None]]:
        """Return the rows of all buckets from a number on; the newest may still change."""
        return [bucket.row() for bucket in self._buckets if bucket.number >= since]

    def latencies(self, since_s: float) -> dict[str, float | None]:
        """Return percentiles of TTFT and of gaps over all buckets that begin after a time, in seconds."""
        ttft, gaps = DurationHistogram(), DurationHistogram()
        for bucket in self._buckets:
            if bucket.number * BUCKET_S > since_s:
                ttft.merge(bucket.ttft)
                gaps.merge(bucket.gaps)
        return {
            "ttft_p50_s": ttft.quantile(0.5),
            "ttft_p99_s": ttft.quantile(0.99),
            "tbt_p99_s": gaps.quantile(0.99),
        }

    @property
    def newest(self) -> int:
        """Number of the newest bucket; -1 without any."""
        return self._buckets[-1].number if self._buckets else -1
