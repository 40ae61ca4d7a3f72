"""Sweeps: simulations over seeds and over values of any field of a scenario, in parallel processes.

Results do not depend on how many processes there are: each point and seed is a run of its own.
"""

from __future__ import annotations

import copy
import itertools
import math
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from headway.core.errors import ConfigError
from headway.policy.placement.registry import options_of
from headway.sim.build import InfeasibleError, RunDetail, ScenarioRun, draws_of, run_scenario
from headway.sim.cluster.state import ClusterSpec
from headway.sim.result import point_json, run_json
from headway.sim.scenario import Scenario, parse_scenario

Item = TypeVar("Item")
Result = TypeVar("Result")


def run_in_processes(run: Callable[[Item], Result], tasks: Sequence[Item], jobs: int) -> Iterator[Result]:
    """Yield `run(task)` for each task, in order, computed by `jobs` processes (1: in this one, lazily).

    Results do not depend on `jobs`. `run`, tasks and results must be picklable when `jobs` is above 1.
    """
    with WorkerProcesses(min(jobs, len(tasks))) as workers:
        yield from workers.map(run, tasks)


class WorkerProcesses:
    """Processes for several rounds of tasks, started with the first task and ended with the `with` block."""

    def __init__(self, jobs: int) -> None:
        """jobs: number of processes; at most 1: the caller's own."""
        self._jobs = jobs
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> WorkerProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def map(self, run: Callable[[Item], Result], tasks: Sequence[Item]) -> Iterator[Result]:
        if self._jobs <= 1 or not tasks:
            # lazy and in this process: no start-up cost, and errors keep their traceback
            return map(run, tasks)
        if self._pool is None:
            # spawn: a child that inherits nothing gives the same bytes whatever its parent had imported or opened
            spawn = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self._jobs, spawn, _end_with_parent)
        return self._pool.map(run, tasks)


def _end_with_parent() -> None:
    """End this process when the one that started it has ended, however that ended. Called first in a worker."""
    # A worker that waits would print a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


Values = tuple[str, list[Any]]
LOAD = "workload.qps"
MOST_VALUES = 1000
"""Values that one sweep may have."""
Stopwatch = Callable[[], float] | None
RunOutcome = dict[str, Any] | str
"""A run's JSON, or the reason why its layout does not fit in memory."""


class Task(NamedTuple):
    """One seed of one point."""

    scenario: Scenario
    seed: int
    stopwatch: Stopwatch
    cluster: ClusterSpec | None = None
    one_of_several: bool = False
    """Then a fault is the point's outcome, and the other points are simulated."""


class ParsedScenario(NamedTuple):
    """What a point's data say."""

    scenario: Scenario
    cluster: ClusterSpec | None = None
    """Measured instances of a cluster file, in place of those that a scenario describes."""


ParsePoint = Callable[[Mapping[str, Any], str], ParsedScenario]
"""Validates a point's data; the second argument names them in errors."""


def scenario_point(data: Mapping[str, Any], where: str) -> ParsedScenario:
    """Validate a scenario's data."""
    return ParsedScenario(parse_scenario(data, where))


def parse_sweep(text: str, option: str = "--sweep") -> Values:
    """`workload.qps=0.25:1.75:0.25` (both ends included) or `policy.policy=fcfs,lars` → (field, values).

    Values that begin with a bracket are YAML, as in `search.tp=[4, 8]`: one value, of which a comma is no end.
    option: what errors say was faulty. Raises ConfigError, also for more than `MOST_VALUES` values.
    """
    import yaml

    from headway.core.strict_yaml import load

    field, equals, rest = text.partition("=")
    if not equals or not field.strip() or not rest.strip():
        form = "FIELD=VALUE" if option == "--set" else "FIELD=START:STOP:STEP or FIELD=VALUE,VALUE"
        raise ConfigError(f"{option} {text!r}: write {form}")
    parts = rest.split(":")
    try:
        start, stop, step = (float(part) for part in parts)
    except ValueError:
        try:
            if rest.lstrip().startswith(("[", "{")):
                return field.strip(), load(f"[{rest}]")
            return field.strip(), [load(part) for part in rest.split(",")]
        except yaml.YAMLError as error:
            raise ConfigError(
                f"{option} {text!r}: {rest!r} is not a value in YAML ({' '.join(str(error).split())})"
            ) from None
    if not (0 < step < math.inf and start <= stop):
        raise ConfigError(f"{option} {text!r}: the step must be above 0 and the stop not below the start")
    # the tolerance keeps the last value despite rounding errors; rounding to 12 digits removes them from values
    steps = (stop - start) / step + 1e-9
    if steps >= MOST_VALUES:
        raise ConfigError(f"{option} {text!r} gives more than {MOST_VALUES:,} values: take a larger step")
    count = int(steps) + 1
    values = [round(start + i * step, 12) for i in range(count)]
    whole = all(part.strip().lstrip("-").isdigit() for part in parts)
    return field.strip(), [int(value) for value in values] if whole else values


def with_field(data: Mapping[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Return a copy of a scenario's data with the field at `path` set; missing sections are created.

    `path`: names joined by dots; an element of a list by its index, as in `cluster.pools.0.count`.
    """
    changed = copy.deepcopy(dict(data))
    at: Any = changed
    *sections, name = path.split(".")
    for section in sections:
        # a number addresses an element of a list, such as a pool
        at = at[_index(at, section, path)] if isinstance(at, list) else at.setdefault(section, {})
        if not isinstance(at, dict | list):
            raise ConfigError(f"{path}: {section!r} is not a section")
    if isinstance(at, list):
        at[_index(at, name, path)] = value
    else:
        at[name] = value
    return changed


def _index(elements: list[Any], name: str, path: str) -> int:
    """Return the index that a part of a path says. Raises ConfigError where the list has no such element."""
    if not name.isdecimal() or int(name) >= len(elements):
        raise ConfigError(
            f"{path}: {name!r} is not an element of a list of {len(elements)}: write 0 to {len(elements) - 1}"
        )
    return int(name)


def points_of(data: Mapping[str, Any], sweeps: Sequence[Values]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield (swept fields and their values, the scenario's data) for every combination of the swept values.

    Options that another placement than the scenario's own does not know are left out. Raises ConfigError for a field
    that is swept twice."""
    fields = [field for field, _ in sweeps]
    twice = next((field for field in fields if fields.count(field) > 1), None)
    if twice is not None:
        raise ConfigError(f"{twice} is swept twice: give all of its values at once, such as {twice}=VALUE,VALUE")
    for chosen in itertools.product(*(values for _, values in sweeps)):
        at = {field: value for (field, _), value in zip(sweeps, chosen, strict=True)}
        changed = dict(data)
        for field, value in at.items():
            changed = with_field(changed, field, value)
        yield at, _with_known_options(data, changed)


def _with_known_options(data: Mapping[str, Any], changed: dict[str, Any]) -> dict[str, Any]:
    """Return a point's data whose placement's options are those that it knows, if it is another than `data` has."""
    at = "options" if "pools" in changed else "cluster.options"
    old, new = (each if "pools" in changed else each.get("cluster", {}) for each in (data, changed))
    name, options = (new.get(key) if isinstance(new, Mapping) else None for key in ("placement", "options"))
    if not options or not isinstance(name, str) or name == old.get("placement") or not isinstance(options, Mapping):
        return changed
    try:
        known = options_of(name).model_fields
    except ConfigError:
        # Said by the parser, as the point's fault.
        return changed
    return with_field(changed, at, {key: value for key, value in options.items() if key in known})


@dataclass(frozen=True)
class SweepPoint:
    """One combination of the swept values, validated."""

    at: Mapping[str, Any]
    """The swept fields and their values; empty without a sweep."""
    scenario: Scenario
    cluster: ClusterSpec | None = None


@dataclass(frozen=True)
class FaultyPoint:
    """A combination of the swept values that is no scenario, among others that are."""

    at: Mapping[str, Any]
    why: str


@dataclass(frozen=True)
class SweepResult:
    """The result of a sweep."""

    points: list[dict[str, Any]]
    """The JSON of each point, in order (`result_json.point_json`)."""
    first: ScenarioRun | None = None
    """The first point's first seed, where it was asked for and is feasible."""


def parse_points(
    data: Mapping[str, Any], sweeps: Sequence[Values], name: str = "scenario", parse: ParsePoint = scenario_point
) -> list[SweepPoint | FaultyPoint]:
    """Parse a scenario once for every combination of the swept values. ConfigError, if no combination is a scenario,
    before any simulation runs."""
    points: list[SweepPoint | FaultyPoint] = []
    errors: list[ConfigError] = []
    for at, changed in points_of(data, sweeps):
        try:
            points.append(SweepPoint(at, *parse(changed, f"{name} at {at}" if at else name)))
        except ConfigError as error:
            points.append(FaultyPoint(at, str(error)))
            errors.append(error)
    if len(errors) == len(points):
        raise errors[0]
    return points


def with_common_draws(
    data: Mapping[str, Any], sweeps: Sequence[Values], parse: ParsePoint = scenario_point
) -> Mapping[str, Any]:
    """Return the data with as many draws at every point of a sweep of the load as the highest load needs.

    All points then have the same requests, closer together at higher loads (common random numbers), so that a curve
    over the load is not the noise of different draws. Scenarios that fix the number themselves, or take a trace's
    requests, are returned as they are.
    """
    if LOAD not in (field for field, _ in sweeps):
        return data
    points = parse_points(data, sweeps, parse=parse)
    scenarios = [point.scenario for point in points if isinstance(point, SweepPoint)]
    if any(each.workload.trace or each.workload.requests or each.workload.draws for each in scenarios):
        return data
    return with_field(data, "workload.draws", max(draws_of(each.workload, each.run.window_s) for each in scenarios))


def run_points(
    points: Sequence[SweepPoint | FaultyPoint],
    jobs: int,
    on_run: Callable[[], None] = lambda: None,
    *,
    first: RunDetail | None = None,
    stopwatch: Stopwatch = None,
) -> SweepResult:
    """Simulate every seed of every point, each once, in `jobs` processes.

    first: what to keep of the first point's first seed, which is then simulated in this process. on_run: called after
    each simulation. Of several points, one that cannot be simulated is one without runs.
    """
    sound = [point for point in points if isinstance(point, SweepPoint)]
    tasks = [
        Task(point.scenario, seed, stopwatch, point.cluster, len(points) > 1)
        for point in sound
        for seed in point.scenario.run.seeds
    ]
    # a reason (str) where the first point does not fit in memory
    kept: ScenarioRun | str | None = None
    outcomes: list[RunOutcome] = []
    # traces and pictures need the run's objects, which are not sent between processes
    if first is not None:
        kept = _simulate(tasks[0], first)
        outcomes.append(_outcome(kept, tasks[0].seed))
        on_run()
    for outcome in run_in_processes(_run_task, tasks[len(outcomes) :], jobs):
        outcomes.append(outcome)
        on_run()
    following = iter(outcomes)
    return SweepResult(
        points=[
            point_json(point.at, [], point.why)
            if isinstance(point, FaultyPoint)
            else _point(point.at, [next(following) for _ in point.scenario.run.seeds])
            for point in points
        ],
        first=None if isinstance(kept, str) else kept,
    )


def _point(at: Mapping[str, Any], outcomes: Sequence[RunOutcome]) -> dict[str, Any]:
    runs = [outcome for outcome in outcomes if not isinstance(outcome, str)]
    return point_json(at, runs, next((outcome for outcome in outcomes if isinstance(outcome, str)), None))


def _simulate(task: Task, detail: RunDetail) -> ScenarioRun | str:
    """Simulate one seed. Return the reason instead where memory does not allow the layout."""
    try:
        return run_scenario(task.scenario, task.seed, detail=detail, stopwatch=task.stopwatch, measured=task.cluster)
    except ConfigError as error:
        if not (task.one_of_several or isinstance(error, InfeasibleError)):
            raise
        return str(error)


def _outcome(run: ScenarioRun | str, seed: int) -> RunOutcome:
    return run if isinstance(run, str) else run_json(run.sim, seed)


def _run_task(task: Task) -> RunOutcome:
    return _outcome(_simulate(task, RunDetail()), task.seed)
