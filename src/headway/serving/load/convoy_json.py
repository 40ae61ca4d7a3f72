"""JSON of the convoy: written by `headway bench convoy --json`, and the input of its picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from headway.serving.load.convoy import ConvoyPlan, ConvoyRun
from headway.serving.load.machine import machine, versions
from headway.serving.load.policies import PolicySpec
from headway.sim.metrics.definitions import tbt_s, ttft_s
from headway.sim.metrics.quantiles import percentile_name, percentiles, quantile

SCHEMA = "headway.convoy/1"


def run_json(spec: PolicySpec, run: ConvoyRun) -> dict[str, Any]:
    """Return one run. Times in seconds; `series` has one row per short: due time, TTFT, largest TBT, error."""
    # Failed shorts have no latency: they are counted in `failed` and left out of percentiles.
    ttfts = [ttft_s(short) for short in run.shorts if short.ok]
    gaps = [gap for short in run.shorts if short.ok for gap in tbt_s(short)]
    long_s, alone_s = run.long_s, run.alone_s
    return {
        "policy": spec.policy,
        "chunking": spec.chunking,
        "short": {
            "ttft_s": percentiles(ttfts),
            "tbt_s": percentiles(gaps),
            "n": len(run.shorts),
            "failed": sum(not short.ok for short in run.shorts),
            "alone_ttft_s": run.short_alone_s,
        },
        "long": {
            "ttft_s": {
                percentile_name(p): quantile([s for c in run.convoys if (s := ttft_s(c.long)) is not None], p)
                for p in (50,)
            },
            "alone_s": alone_s,
            "slowdown": long_s / alone_s if long_s is not None and alone_s else None,
        },
        "convoys": [
            {
                "long_ttft_s": ttft_s(convoy.long),
                "cut_short": convoy.cut_short,
                "series": [
                    {
                        "t_s": short.arrival_s,
                        "ttft_s": ttft_s(short),
                        "max_tbt_s": max(tbt_s(short), default=None),
                        "error": short.error,
                    }
                    for short in convoy.shorts
                ],
            }
            for convoy in run.convoys
        ],
    }


def convoy_json(model: str, plan: ConvoyPlan, runs: Sequence[tuple[PolicySpec, ConvoyRun]]) -> dict[str, Any]:
    """Return the file's contents."""
    return {
        "schema": SCHEMA,
        "model": model,
        "plan": asdict(plan),
        "machine": machine(),
        "versions": versions(),
        "runs": [run_json(spec, run) for spec, run in runs],
    }
