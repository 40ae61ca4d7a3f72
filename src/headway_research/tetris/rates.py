"""Tetris's improvement-rate profiler (§5.1, §6): simulate loads of given lengths under every rate, keep the best.

For each load (0.5 requests a second apart, or finer where the cluster carries little) Poisson arrivals of the given
lengths are placed by Tetris on a simulated cluster with each candidate rate; the one with the least mean TTFT is
recorded. Seeds are not those of evaluations. The result is the points of a `RateTable`: data that a
policy is given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headway.sim.build import run_scenario
from headway.sim.metrics import ttft_s
from headway.sim.scenario import parse_scenario
from headway.sim.sweep import with_field
from headway_research.base import RunOptions
from headway_research.tetris.setting import LOADS, TetrisPoint, measured

CANDIDATES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.75)
# apart from the seeds of evaluations: rates must not be fitted to their arrivals
SEEDS = (1000, 1001)
REQUESTS = 1000
# profiling is as expensive as a figure: computed once for all figures of a process
_KNOWN: dict[tuple[str, str, bool, float], tuple[tuple[float, float], ...]] = {}


def best_rates(
    loads: Sequence[float], candidates: Sequence[float], mean_ttft_s: Callable[[float, float], float]
) -> tuple[tuple[float, float], ...]:
    """Return (load, rate) for each load: the candidate with the least mean TTFT, of equal ones the smallest."""
    return tuple((load, min(candidates, key=lambda rate: (mean_ttft_s(load, rate), rate))) for load in loads)


def profiled(cluster: str, workload: str, options: RunOptions, noise: float = 0.0) -> tuple[tuple[float, float], ...]:
    """Return the table of a cluster and workload, computed once a process. `noise`: of the profiler's own runs."""
    key = (cluster, workload, options.quick, noise)
    if key not in _KNOWN:
        loads = LOADS[cluster, workload]
        loads = loads[::4] if options.quick else loads
        candidates = (0.1, 0.4) if options.quick else CANDIDATES
        count, seeds = (40, SEEDS[:1]) if options.quick else (REQUESTS, SEEDS)

        def points(load: float, rate: float) -> list[TetrisPoint]:
            return [
                TetrisPoint(cluster, workload, "Tetris", load, count, seed, noise, ((0.0, rate),)) for seed in seeds
            ]

        found = measured((p for load in loads for rate in candidates for p in points(load, rate)), options)
        _KNOWN[key] = best_rates(
            loads, candidates, lambda load, rate: sum(found[p].mean for p in points(load, rate)) / len(seeds)
        )
    return _KNOWN[key]


def scenario_ttft_s(data: Mapping[str, Any], load_rps: float, rate: float, count: int, seed: int) -> float:
    """Return the mean TTFT of a scenario's cluster and lengths at a load and with a rate, without the first tenth.

    One token of output for each request: decodes have no effect on prefills."""
    options = {k: v for k, v in data["cluster"].get("options", {}).items() if k not in ("rate", "rates", "rates_file")}
    changed = with_field(data, "cluster.options", options | {"rate": rate})
    for field, value in (("qps", load_rps), ("arrivals", "poisson"), ("requests", count), ("max_output", 1)):
        changed = with_field(changed, f"workload.{field}", value)
    changed = with_field(changed, "run", {"seeds": [seed]})
    records = run_scenario(parse_scenario(changed), seed).sim.records
    found = [wait for record in records[count // 10 :] if (wait := ttft_s(record)) is not None]
    return sum(found) / len(found)
