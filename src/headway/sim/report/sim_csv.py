"""CSV of simulations: one row for each point, class and metric; or one row for each request. Times in seconds."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from headway.sim.metrics import RequestRecord
from headway.sim.metrics.definitions import e2e_s, is_good, normalised_latency_s, queueing_s, tbt_s, tpot_s, ttft_s
from headway.sim.report.sim_table import METRICS


def summary_csv(data: Mapping[str, Any]) -> str:
    """Return means over seeds, with half of the 95% interval of the median where there are several."""
    out = io.StringIO()
    fields = list(data["points"][0]["at"])
    cuts = ["n", "mean", "min", "p1", "p25", "p50", "p75", "p90", "p99", "max"]
    writer = csv.writer(out, lineterminator="\n")
    shares = ["requests", "ok", "good_share", "starved_share", "unfinished"]
    writer.writerow([*fields, "feasible", "class", *shares, "metric", *cuts, "p50_ci95"])
    for point in data["points"]:
        at = [point["at"][field] for field in fields]
        if not point["feasible"]:
            writer.writerow([*at, False])
            continue
        blocks = [*point["mean"]["classes"], point["mean"]["total"]]
        spreads = [*point["ci95"]["classes"], point["ci95"]["total"]] if point["ci95"] else [None] * len(blocks)
        for block, spread in zip(blocks, spreads, strict=True):
            for _, key in METRICS:
                values = [block[key][cut] for cut in cuts]
                half = spread[key]["p50"] if spread else None
                writer.writerow([*at, True, block["class"], *(block[name] for name in shares), key, *values, half])
    return out.getvalue()


def requests_csv(records: Sequence[RequestRecord]) -> str:
    """Return one row for each request, in order of arrival."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(
        ["id", "class", "arrival_s", "prompt_tokens", "output_tokens", "queueing_s", "ttft_s", "tpot_s", "max_tbt_s",
         "e2e_s", "normalised_latency_s", "good", "error", "cached_tokens"]
    )  # fmt: skip
    for r in records:
        latencies = (
            queueing_s(r),
            ttft_s(r),
            tpot_s(r),
            max(tbt_s(r), default=None),
            e2e_s(r),
            normalised_latency_s(r),
        )
        counts = (r.prompt_tokens, r.output_tokens)
        writer.writerow([r.id, r.klass, r.arrival_s, *counts, *latencies, is_good(r), r.error or "", r.cached_tokens])
    return out.getvalue()
