"""JSON of a load run: the summary, and one row per request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headway.serving.load.machine import machine, versions
from headway.sim.metrics import RequestRecord, RunSummary
from headway.sim.metrics.definitions import e2e_s, is_good, tbt_s, tpot_s, ttft_s
from headway.sim.metrics.quantiles import percentiles

SCHEMA = "headway.bench/1"


def load_json(
    *,
    model: str,
    workload: dict[str, Any],
    goodput: dict[str, Any],
    seed: int,
    summary: RunSummary,
    records: Sequence[RequestRecord],
    interrupted: bool,
) -> dict[str, Any]:
    """Return the file's contents. Times in seconds."""
    return {
        "schema": SCHEMA,
        "model": model,
        "workload": workload,
        "goodput_s": goodput,
        "seed": seed,
        "interrupted": interrupted,
        "machine": machine(),
        "versions": versions(),
        "summary": summary.to_json(),
        "send_lag_s": send_lag(records),
        "requests": [_row(record) for record in records],
    }


def send_lag(records: Sequence[RequestRecord]) -> dict[str, float | None]:
    """Return percentiles of the client's delay, sent - due, in seconds. Latencies include it."""
    return percentiles(record.sent_s - record.arrival_s for record in records if record.sent_s is not None)


def _row(record: RequestRecord) -> dict[str, Any]:
    return {
        "id": record.id,
        "class": record.klass,
        "arrival_s": record.arrival_s,
        "sent_s": record.sent_s,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "output_tokens": record.output_tokens,
        "ttft_s": ttft_s(record),
        "tpot_s": tpot_s(record),
        "max_tbt_s": max(tbt_s(record), default=None),
        "e2e_s": e2e_s(record),
        "good": is_good(record),
        "finish_reason": record.finish_reason,
        "error": record.error,
    }
