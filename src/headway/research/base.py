"""What an experiment takes and what it gives: options in; rows of claims, what they rest on, and curves out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

SCHEMA = "headway.reproduce/1"
Mode = Literal["paper", "default"]
MODES: tuple[Mode, Mode] = ("paper", "default")


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How much is run. quick: a smoke test (short window, one seed, few points), not a reproduction.

    seeds, window_s: in place of the experiment's own; jobs: processes for simulations. stopwatch: a real clock in
    seconds, for experiments that time a decision; without one they say that nothing was timed."""

    quick: bool = False
    seeds: tuple[int, ...] | None = None
    window_s: float | None = None
    jobs: int = 1
    stopwatch: Callable[[], float] | None = None
    done: Callable[[int, int], None] = field(default=lambda done, total: None)


@dataclass(frozen=True, kw_only=True)
class ClaimRow:
    """A claim of the paper beside what came out. `paper_mode` and `default_mode` are numbers, texts, or mappings."""

    claim: str
    paper: Any
    paper_mode: Any
    default_mode: Any
    verdict: str
    why: str

    def to_json(self) -> dict[str, Any]:
        return {
            "claim": self.claim,
            "paper": plain(self.paper),
            "ours": {"paper_mode": plain(self.paper_mode), "default_mode": plain(self.default_mode)},
            "verdict": self.verdict,
            "why": self.why,
        }


@dataclass(frozen=True, kw_only=True)
class PlotPanel:
    """Curves of one picture: label → points."""

    title: str
    x: str
    y: str
    lines: Mapping[str, Sequence[tuple[float, float]]]
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True, kw_only=True)
class ExperimentReport:
    """What an experiment found. source: where latencies come from, the scenario, seeds and window."""

    source: Mapping[str, Any]
    rows: tuple[ClaimRow, ...]
    panels: tuple[PlotPanel, ...] = ()

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


def plain(value: Any) -> Any:
    """Numbers with four significant digits, so that files are readable and equal; containers as JSON has them."""
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
    return plain(float(value))
