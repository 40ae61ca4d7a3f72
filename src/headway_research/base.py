"""Common types of experiments: options in; claims with verdicts, their source, and curves out; results of simulations
that several figures share."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from headway.sim.report.page import ReportChart
from headway.sim.sweep import run_in_processes

SCHEMA = "headway.reproduce/1"
Point = TypeVar("Point", bound=Hashable)
Result = TypeVar("Result")
Mode = Literal["paper", "default"]
MODES: tuple[Mode, Mode] = ("paper", "default")
Kind = Literal["exact", "two-sided", "one-sided", "trend"]
"""What a rule asks: an equal number, a band around a number, a bound, or an order without a size."""
KINDS: tuple[Kind, ...] = ("two-sided", "one-sided", "trend", "exact")


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of a run of an experiment."""

    quick: bool = False
    """A smoke test (short window, one seed, few points), not a reproduction."""
    seeds: tuple[int, ...] | None = None
    """Seeds instead of the experiment's own."""
    window_s: float | None = None
    """Observed seconds, instead of the experiment's own."""
    jobs: int = 1
    """Processes for simulations."""
    stopwatch: Callable[[], float] | None = None
    """A real clock in seconds, for experiments that time a decision; without one nothing is timed."""
    on_progress: Callable[[int, int], None] = field(default=lambda done, total: None)
    """Called after each simulation with (done, total) of the batch of simulations in progress."""


@dataclass(frozen=True, kw_only=True)
class ClaimRow:
    """One claim of a paper beside the values found here. Values are numbers, texts, or mappings of them."""

    claim: str
    paper: Any
    """The paper's value, as it states it; None: a check of our own, which no paper claims."""
    paper_mode: Any
    """The value in paper mode; None where the mode does not apply."""
    default_mode: Any
    kind: Kind
    verdict: str
    """One of `verdicts`."""
    why: str
    """The rule that was applied, in which mode it holds, and a note."""

    def to_json(self) -> dict[str, Any]:
        return {
            "claim": self.claim,
            "paper": plain(self.paper),
            "ours": {"paper_mode": plain(self.paper_mode), "default_mode": plain(self.default_mode)},
            "kind": self.kind,
            "verdict": self.verdict,
            "why": self.why,
        }


@dataclass(frozen=True, kw_only=True)
class ExperimentReport:
    """The outcome of an experiment."""

    source: Mapping[str, Any]
    """Provenance: source of the latencies, scenario, seeds and window."""
    rows: tuple[ClaimRow, ...]
    panels: tuple[ReportChart, ...] = ()

    def to_json(self, name: str) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "id": name,
            "source": plain(self.source),
            "rows": [row.to_json() for row in self.rows],
            "panels": [
                {"title": p.title, "x": p.x, "y": p.y, "lines": {k: plain(list(v)) for k, v in p.lines.items()}}
                for p in self.panels
            ],
        }


def source(
    latency: Any, scenario: str, seeds: Sequence[int] = (), window_s: float | None = None, **more: Any
) -> dict[str, Any]:
    """Return the `source` of a report. latency: where times come from. seeds: empty where nothing is drawn. window_s:
    observed seconds; None: to the last request's end. more: what else a reader of the JSON may want."""
    return {"latency": latency, "scenario": scenario, "seeds": list(seeds), "window_s": window_s, **more}


def plain(value: Any) -> Any:
    """Return plain data: numbers with four significant digits, containers as JSON has them."""
    # bool before int: True is an int
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    # numpy scalars
    return plain(float(value))


def as_words(value: Any) -> str:
    """Return a value as a text: of a mapping, each key with its value; of a sequence, each value."""
    value = plain(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {as_words(item)}" for key, item in value.items()) or "no value"
    return ", ".join(map(as_words, value)) if isinstance(value, list) else str(value)


class SimulationCache(Generic[Point, Result]):
    """Results of simulations by point: everything that determines a result, as a hashable value.

    One cache for each kind of point serves all figures of a process, so that `reproduce all` simulates a point once.
    """

    def __init__(self) -> None:
        self._results: dict[Point, Result] = {}

    def ensure(
        self,
        points: Iterable[Point],
        run: Callable[[Point], Result],
        jobs: int = 1,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Simulate the points that have no result yet. on_progress: called after each with (done, total)."""
        # distinct, in order: results arrive in the order of the tasks
        missing = [point for point in dict.fromkeys(points) if point not in self._results]
        for done, (point, result) in enumerate(zip(missing, run_in_processes(run, missing, jobs), strict=True), 1):
            self._results[point] = result
            on_progress(done, len(missing))

    def __contains__(self, point: Point) -> bool:
        return point in self._results

    def __getitem__(self, point: Point) -> Result:
        return self._results[point]

    def clear(self) -> None:
        """Forget all results."""
        self._results.clear()
