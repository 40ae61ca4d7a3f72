"""Many simulations: over seeds, and over values of any field of a scenario, in parallel processes.

Results do not depend on how many processes there are: each point and seed is a run of its own.
"""

from __future__ import annotations

import copy
import itertools
import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any

from headway.core.errors import ConfigError
from headway.sim.memory import InfeasibleError
from headway.sim.result_json import point_json, run_json
from headway.sim.scenario import parse_scenario

Values = tuple[str, list[Any]]
Stopwatch = Callable[[], float] | None
Task = tuple[int, dict[str, Any], int, Stopwatch]


def parse_sweep(text: str) -> Values:
    """`workload.qps=0.25:1.75:0.25` (both ends included) or `policy.policy=fcfs,lars` → (field, values)."""
    import yaml

    field, equals, rest = text.partition("=")
    if not equals or not field.strip() or not rest.strip():
        raise ConfigError(f"--sweep {text!r}: write FIELD=START:STOP:STEP or FIELD=VALUE,VALUE")
    parts = rest.split(":")
    try:
        start, stop, step = (float(part) for part in parts)
    except ValueError:
        return field.strip(), [yaml.safe_load(part) for part in rest.split(",")]
    if step <= 0 or stop < start:
        raise ConfigError(f"--sweep {text!r}: the step must be above 0 and the stop not below the start")
    count = int((stop - start) / step + 1e-9) + 1
    values = [round(start + i * step, 12) for i in range(count)]
    whole = all(part.strip().lstrip("-").isdigit() for part in parts)
    return field.strip(), [int(value) for value in values] if whole else values


def with_field(data: Mapping[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy of a scenario's data with one field set. Sections that are not there yet are made."""
    changed = copy.deepcopy(dict(data))
    at: Any = changed
    *sections, name = path.split(".")
    for section in sections:
        at = at[int(section)] if isinstance(at, list) else at.setdefault(section, {})
        if not isinstance(at, dict | list):
            raise ConfigError(f"--sweep {path}: {section!r} is not a section")
    if isinstance(at, list):
        at[int(name)] = value
    else:
        at[name] = value
    return changed


def points_of(data: Mapping[str, Any], sweeps: Sequence[Values]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """(what is set, the scenario's data) for every combination of the swept values."""
    for chosen in itertools.product(*(values for _, values in sweeps)):
        at = {field: value for (field, _), value in zip(sweeps, chosen, strict=True)}
        changed = dict(data)
        for field, value in at.items():
            changed = with_field(changed, field, value)
        yield at, changed


def run_points(
    data: Mapping[str, Any],
    sweeps: Sequence[Values],
    jobs: int,
    done: Callable[[], None] = lambda: None,
    *,
    stopwatch: Stopwatch = None,
) -> list[dict[str, Any]]:
    """One JSON point for each combination, in order. Every point is validated before the first one runs."""
    points = list(points_of(data, sweeps))
    seeds = [parse_scenario(changed, f"scenario at {at}" if at else "scenario").run.seeds for at, changed in points]
    tasks = [(i, changed, seed, stopwatch) for i, (_, changed) in enumerate(points) for seed in seeds[i]]
    outcomes: list[list[dict[str, Any] | str]] = [[] for _ in points]
    for (i, *_), outcome in zip(tasks, _outcomes(tasks, jobs), strict=True):
        outcomes[i].append(outcome)
        done()
    return [
        point_json(
            at,
            [outcome for outcome in outcomes[i] if not isinstance(outcome, str)],
            next((outcome for outcome in outcomes[i] if isinstance(outcome, str)), None),
        )
        for i, (at, _) in enumerate(points)
    ]


def _outcomes(tasks: Sequence[Task], jobs: int) -> Iterator[dict[str, Any] | str]:
    if jobs <= 1 or len(tasks) == 1:
        yield from (_one(*task) for task in tasks)
        return
    # spawn: a child that inherits nothing gives the same bytes whatever its parent had imported or opened
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(tasks)), mp_context=context) as pool:
        futures: list[Future[dict[str, Any] | str]] = [pool.submit(_one, *task) for task in tasks]
        for future in futures:
            yield future.result()


def _one(point: int, data: dict[str, Any], seed: int, stopwatch: Stopwatch) -> dict[str, Any] | str:
    """A run's JSON, or why it cannot be."""
    from headway.sim.build import run_scenario

    try:
        return run_json(run_scenario(parse_scenario(data), seed, stopwatch=stopwatch), seed)
    except InfeasibleError as error:
        return str(error)
