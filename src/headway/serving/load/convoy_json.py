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
MEASURES = {
    "ttft_p50": ("short", "ttft_s", "p50"),
    "ttft_p99": ("short", "ttft_s", "p99"),
    "tbt_p50": ("short", "tbt_s", "p50"),
    "tbt_p99": ("short", "tbt_s", "p99"),
    "long_ttft": ("long", "ttft_s", "p50"),
}
"""What is compared of two runs, and its place in a run's JSON."""


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


def convoy_json(
    model: str, plan: ConvoyPlan, runs: Sequence[tuple[PolicySpec, ConvoyRun]], compared: bool = False
) -> dict[str, Any]:
    """Return the file's contents, with ratios where runs are `compared`."""
    found = [run_json(spec, run) for spec, run in runs]
    return {
        "schema": SCHEMA,
        "model": model,
        "plan": asdict(plan),
        "machine": machine(),
        "versions": versions(),
        "runs": found,
        "ratios": ratios(found) if compared else [],
    }


def ratios(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each further run's times over the first run's, by the names of `MEASURES`; None without a value."""
    first = runs[0]
    return [
        {
            "policy": run["policy"],
            **{name: _ratio(value_of(run, path), value_of(first, path)) for name, path in MEASURES.items()},
        }
        for run in runs[1:]
    ]


def value_of(run: Any, path: Sequence[str]) -> float | None:
    """Return a number of a run's JSON."""
    for part in path:
        run = run[part]
    return None if run is None else float(run)


def _ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None
