"""Results as plain data: one run, several seeds with confidence intervals, points of a sweep."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from headway.sim.result import SimResult

SCHEMA = "headway.simulate/1"

_T975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
         2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045)  # fmt: skip
"""97.5% quantiles of Student's t for 1, 2, … degrees of freedom."""


def run_json(result: SimResult, seed: int) -> dict[str, Any]:
    """Return the JSON of one seed: the summary, starved and unfinished requests by class, and utilisation."""
    body = result.summary().to_json()
    starved: dict[str, int] = {}
    for record in result.records:
        if record.scheduled_s is None and not record.rejected:
            starved[record.klass] = starved.get(record.klass, 0) + 1
    # the loop's first block is the total, the others are classes; each gets its share of requests never scheduled
    for block in (body["total"], *body["classes"]):
        count = result.starved if block is body["total"] else starved.get(block["class"], 0)
        block["starved_share"] = count / block["requests"] if block["requests"] else None
        block["unfinished"] = block["errors"].get("unfinished", 0)
    use = result.use_json()
    decided_s = sum(replica.scheduling_s for replica in result.replicas)
    # only runs with a stopwatch have it: without one the output stays deterministic
    if decided_s:
        jct_s = sum(r.finish_s - r.arrival_s for r in result.records if r.finish_s is not None)
        use["scheduling_s"] = decided_s
        use["scheduling_share_of_jct"] = decided_s / jct_s if jct_s else None
    return {"seed": seed, **body, "use": use}


def point_json(at: Mapping[str, Any], runs: Sequence[dict[str, Any]], why: str | None = None) -> dict[str, Any]:
    """One point of a sweep (or the only one): `mean` and `ci95` have the shape of a run, over its seeds.

    A layout that does not fit in memory is a point without runs; `why` has the reason.
    """
    return {
        "at": dict(at),
        "feasible": why is None,
        "why": why,
        "mean": _over(runs, _mean) if runs else None,
        "ci95": _over(runs, _half_width) if len(runs) > 1 else None,
        "runs": list(runs),
    }


def document(scenario: Mapping[str, Any], points: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the whole result file."""
    return {"schema": SCHEMA, "scenario": dict(scenario), "points": list(points)}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _half_width(values: Sequence[float]) -> float:
    """Half of the 95% confidence interval of the mean (Student's t; seeds are independent)."""
    n = len(values)
    if n < 2:
        return 0.0
    mean = _mean(values)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (n - 1))
    return (_T975[n - 2] if n - 2 < len(_T975) else 1.96) * deviation / math.sqrt(n)


def _over(runs: Sequence[Any], reduce: Any) -> Any:
    """Return the runs' common shape with numbers reduced over runs; None where no run has one.

    Classes are matched by name.
    """
    first = next((run for run in runs if run is not None), None)
    if isinstance(first, Mapping):
        # union of keys in order of first appearance: a run may lack an optional one
        keys = dict.fromkeys(key for run in runs if run is not None for key in run)
        return {
            key: _classes([run["classes"] for run in runs], reduce)
            if key == "classes"
            else _over([run.get(key) for run in runs if run is not None], reduce)
            for key in keys
            if key not in ("seed", "schema", "errors")
        }
    numbers = [float(run) for run in runs if isinstance(run, int | float)]
    return reduce(numbers) if numbers else first


def _classes(runs: Sequence[Sequence[Mapping[str, Any]]], reduce: Any) -> list[Any]:
    names = dict.fromkeys(block["class"] for blocks in runs for block in blocks)
    return [_over([block for blocks in runs for block in blocks if block["class"] == name], reduce) for name in names]
