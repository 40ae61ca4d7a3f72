"""JSON of a load run: the summary, also under the names of `vllm bench serve`, and one row per request."""

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
    """Return the file's contents. Times in seconds, except under `vllm`, whose keys end in `_ms`."""
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
        "vllm": vllm_names(summary),
        "requests": [_row(record) for record in records],
    }


def send_lag(records: Sequence[RequestRecord]) -> dict[str, float | None]:
    """Return percentiles of the client's delay, sent - due, in seconds. Latencies include it."""
    return percentiles(record.sent_s - record.arrival_s for record in records if record.sent_s is not None)


def vllm_names(summary: RunSummary) -> dict[str, float | None]:
    """Return the summary under the keys of `vllm bench serve`, whose ITL is TBT here."""
    total, body = summary.total, summary.to_json()
    flat: dict[str, float | None] = {
        "duration": summary.duration_s,
        "completed": total.ok,
        "failed": total.requests - total.ok,
        "total_input_tokens": total.prompt_tokens,
        "total_output_tokens": total.output_tokens,
        "request_throughput": body["request_throughput_rps"],
        "request_goodput": body["goodput_rps"],
        "output_throughput": body["output_throughput_tps"],
        "total_token_throughput": body["total_throughput_tps"],
    }
    # Keys such as mean_ttft_ms and p99_itl_ms.
    for theirs, ours in (("ttft", "ttft_s"), ("tpot", "tpot_s"), ("itl", "tbt_s"), ("e2el", "e2e_s")):
        for prefix, key in (("mean", "mean"), ("median", "p50"), ("p90", "p90"), ("p99", "p99")):
            value = total.latencies[ours].get(key)
            flat[f"{prefix}_{theirs}_ms"] = None if value is None else value * 1000
    return flat


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
