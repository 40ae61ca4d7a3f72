"""MFU and MBU of a running engine: counters of work, the peaks, and shares over the last seconds."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from headway.core.errors import UnavailableError
from headway.perf.hardware.utilisation import UtilisationBase
from headway.runtime.engine.protocol import EngineClient, EngineStats

WINDOW_S = 10.0
"""Least time that a share is over, but for the first scrapes; at most it is that from one scrape to the next."""


class UtilisationCollector:
    """Collector of work and utilisation, read at each scrape; nothing while the peaks are not known."""

    def __init__(self, prefix: str, engine: EngineClient, clock: Callable[[], float] = time.monotonic) -> None:
        self._prefix = prefix
        self._engine = engine
        self._clock = clock
        # (time, FLOPs, bytes) of earlier scrapes: one from before the window, then those in it.
        self._samples: deque[tuple[float, float, float]] = deque([(clock(), 0.0, 0.0)])

    def collect(self) -> Iterator[Metric]:
        """Yield counters and gauges; called by the registry at each scrape."""
        try:
            base = self._engine.info.utilisation
        except UnavailableError:
            return
        if base is None:
            return
        flops, read = work_of(base, self._engine.stats)
        mfu, mbu = self._shares(base, flops, read)
        yield self._counter("model_flops", "FLOPs of the model: matrix products and causal attention.", flops)
        yield self._counter("model_bytes_read", "Bytes of weights, once a forward pass, and of KV read.", read)
        for name, text, peak in (
            ("peak_flops", "FLOP/s that the devices can do: a data sheet's, or measured at start-up.", base.peak_flops),
            ("peak_bandwidth", "Bytes/s that they can read: a data sheet's, or measured.", base.peak_bandwidth),
        ):
            gauge = GaugeMetricFamily(self._prefix + name, text, labels=("origin",))
            gauge.add_metric((base.origin,), peak)
            yield gauge
        over = f"over at least the last {WINDOW_S:g} s"
        yield GaugeMetricFamily(self._prefix + "mfu", f"Model FLOPs utilisation {over} (0 to 1).", value=mfu)
        yield GaugeMetricFamily(self._prefix + "mbu", f"Memory bandwidth utilisation {over} (0 to 1).", value=mbu)

    def _counter(self, name: str, text: str, value: float) -> Metric:
        return CounterMetricFamily(self._prefix + name, text, value=value)

    def _shares(self, base: UtilisationBase, flops: float, read: float) -> tuple[float, float]:
        """Return MFU and MBU since the newest sample that is old enough, else since the oldest."""
        now = self._clock()
        while len(self._samples) > 1 and now - self._samples[1][0] >= WINDOW_S:
            self._samples.popleft()
        then, flops_before, read_before = self._samples[0]
        # Scrapes in quick succession add no samples.
        if now - self._samples[-1][0] >= 1.0:
            self._samples.append((now, flops, read))
        seconds = now - then
        if seconds <= 0:
            return 0.0, 0.0
        return (
            max(0.0, flops - flops_before) / (seconds * base.peak_flops),
            max(0.0, read - read_before) / (seconds * base.peak_bandwidth),
        )


def work_of(base: UtilisationBase, stats: EngineStats) -> tuple[float, float]:
    """Return the FLOPs done and the bytes read since the engine started."""
    tokens = stats.prefill_tokens_total + stats.decode_tokens_total
    flops = base.flops(tokens, stats.attention_pairs_total)
    return flops, base.bytes_read(stats.passes_total, stats.kv_read_tokens_total)
