"""One line in the log every few seconds while there is work: load, throughput, KV in use, latencies kept."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from headway.runtime.engine.protocol import EngineClient, EngineStats
from headway.serving.metrics import ServerMetrics

log = logging.getLogger("headway.server")


class StatusLine:
    """The figures of an interval: differences of counters between two calls of `fields`."""

    def __init__(self, engine: EngineClient, metrics: ServerMetrics) -> None:
        self._engine = engine
        self._metrics = metrics
        self._stats = engine.stats
        self._slo = self._slo_counts()

    async def run(self, every_s: float) -> None:
        """Log a line every `every_s` seconds in which there was work, until cancelled."""
        last = time.monotonic()
        while True:
            await asyncio.sleep(every_s)
            now = time.monotonic()
            fields = self.fields(now - last)
            last = now
            if fields is not None:
                log.info("status", extra={"fields": fields})

    def fields(self, seconds: float) -> dict[str, Any] | None:
        """Return the figures of the last `seconds` seconds; None when nothing ran, waited or was computed.

        Rates are in tokens a second. `slo`: share of the requests that ended in the interval with all the latencies
        that they had asked for; left out where none had asked.
        """
        before, stats = self._stats, self._engine.stats
        slo_before, slo = self._slo, self._slo_counts()
        self._stats, self._slo = stats, slo
        prefill = stats.prefill_tokens_total - before.prefill_tokens_total
        decode = stats.decode_tokens_total - before.decode_tokens_total
        if not (stats.running or stats.waiting or prefill or decode):
            return None
        fields: dict[str, Any] = {"running": stats.running, "waiting": stats.waiting}
        fields["prefill_tok_s"] = round(prefill / seconds)
        fields["decode_tok_s"] = round(decode / seconds)
        fields["kv"] = f"{_share(stats):.0%}"
        met, missed = (now - then for now, then in zip(slo, slo_before, strict=True))
        if met + missed:
            fields["slo"] = f"{met / (met + missed):.0%}"
        return fields

    def _slo_counts(self) -> tuple[int, int]:
        return self._metrics.classes.met_total, self._metrics.classes.missed_total


def _share(stats: EngineStats) -> float:
    return stats.kv_tokens_used / stats.kv_tokens_total if stats.kv_tokens_total else 0.0
