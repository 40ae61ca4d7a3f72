"""Simulate one seed of a scenario from Python, and read the result as plain data."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from headway.core.errors import ConfigError
from headway.sim.metrics import RequestRecord, request_row
from headway.sim.result import SimResult, run_json
from headway.sim.scenario import Scenario
from headway.sim.sweep import ParsedScenario, scenario_point, with_field


@dataclass(frozen=True)
class SimulationResult:
    """One simulated run."""

    scenario: Scenario
    seed: int
    sim: SimResult
    """The complete result: request records, what each instance did, iterations where they were kept."""

    @property
    def records(self) -> tuple[RequestRecord, ...]:
        """One record per request, in order of arrival."""
        return self.sim.records

    def to_json(self) -> dict[str, Any]:
        """Return the run as `headway simulate --json` writes it under `points[…].runs[…]`."""
        return run_json(self.sim, self.seed)

    def summary(self) -> dict[str, dict[str, Any]]:
        """Return counts and latency percentiles by class, and over all requests under the key "all"."""
        data = self.to_json()
        return {**{block["class"]: block for block in data["classes"]}, "all": data["total"]}

    def rows(self) -> list[dict[str, Any]]:
        """Return one dict per request: counts, latencies in seconds (None where there is none), verdict, error."""
        return [request_row(record) for record in self.sim.records]

    def frame(self) -> Any:
        """Return `rows()` as a pandas DataFrame. Raises ConfigError where pandas is not installed."""
        try:
            pandas = import_module("pandas")
        except ModuleNotFoundError:
            raise ConfigError("frame() needs pandas, which is not installed; rows() has the same as dicts") from None
        return pandas.DataFrame(self.rows())


def simulate(
    scenario: str | Path | Mapping[str, Any] | Scenario,
    *,
    seed: int | None = None,
    fields: Mapping[str, Any] | None = None,
    keep_iterations: bool = False,
) -> SimulationResult:
    """Simulate one seed of a scenario: the path of a YAML file, its contents as a mapping, or a `Scenario`.

    A cluster file, or its contents, is simulated as it stands: an engine of each pool is loaded and measured, which
    needs `headway[serve]`.
    `seed` defaults to the first of the scenario's `run.seeds`. `fields` sets fields by dotted name, such as
    `{"workload.qps": 2}`, as `--set` does on the command line. `keep_iterations` keeps every batch of a scenario
    without `cluster.placement`. Raises ConfigError on a faulty scenario, InfeasibleError when it does not fit.
    """
    from headway.sim.build import RunDetail, run_scenario

    parsed, measured = _load(scenario, fields)
    # One seed only: several are a sweep's (`headway simulate --seeds`).
    chosen = parsed.run.seeds[0] if seed is None else seed
    run = run_scenario(parsed, chosen, detail=RunDetail(iterations=keep_iterations), measured=measured)
    return SimulationResult(parsed, chosen, run.sim)


def load_scenario(
    scenario: str | Path | Mapping[str, Any] | Scenario, fields: Mapping[str, Any] | None = None
) -> Scenario:
    """Validate a scenario; see `simulate`. A file's relative trace path is looked up beside the file first."""
    parsed = _load(scenario, fields)
    if parsed.cluster is not None:
        raise ConfigError("a cluster file is no scenario without the engines measured for it: give it to simulate()")
    return parsed.scenario


def _load(scenario: str | Path | Mapping[str, Any] | Scenario, fields: Mapping[str, Any] | None) -> ParsedScenario:
    path = Path("scenario")
    if isinstance(scenario, Scenario):
        if not fields:
            return ParsedScenario(scenario)
        # Only what was given: sections check fields against each other, so defaults must not look like choices.
        data: Any = scenario.model_dump(mode="json", by_alias=True, exclude_unset=True)
    elif isinstance(scenario, Mapping):
        data = dict(scenario)
    else:
        path = Path(scenario)
        data = _read(path)
    for name, value in (fields or {}).items():
        # `with_field` copies: the caller's mapping is not changed.
        data = with_field(data, name, value)
    # A list of pools is a cluster file's: a scenario has its pools under `cluster`.
    if not isinstance(data, dict) or "pools" not in data:
        return scenario_point(data, str(path))
    from headway.api.cluster_scenario import ClusterScenarios

    return ClusterScenarios(path, os.environ).parse(data, str(path))


def _read(path: Path) -> Any:
    from headway.core.strict_yaml import read

    data = read(path)
    workload = data.get("workload") if isinstance(data, dict) else None
    trace = workload.get("trace") if isinstance(workload, dict) else None
    if isinstance(workload, dict) and isinstance(trace, str) and (path.parent / trace).exists():
        workload["trace"] = str(path.parent / trace)
    return data
