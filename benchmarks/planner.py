"""Tetris's planner as in the paper's Table 2: 1,000 random states for each largest SP size, compiled and in Python.

python -m benchmarks.planner
"""

from __future__ import annotations

import time

from headway.perf.latency import eq1
from headway.policy.placement.cdsp import CdspPlanner
from headway_research.tetris.overheads import TABLE2, planning_us


def main() -> None:
    """One line a size."""
    compiled = CdspPlanner(eq1.tetris_table1(), [1], [0]).is_native
    print(f"{'SP':>4} {'paper (C++)':>12} {'mean':>8} {'median':>8} {'max':>9}   Python alone: mean, max  (µs)")
    for most, paper in TABLE2.items():
        plain = planning_us(most, time.perf_counter, native=False)
        line = f"{'no compiler':>27}"
        if compiled:
            fast = planning_us(most, time.perf_counter)
            line = f"{fast['mean']:>8.1f} {fast['median']:>8.1f} {fast['max']:>9.1f}"
        print(f"{most:>4} {paper:>12.1f} {line}   {plain['mean']:>8.1f} {plain['max']:>9.1f}")


if __name__ == "__main__":
    main()
