"""Medha's behaviours under the one setting: `python -m benchmarks.medha_behaviours`. 10 to 20 CPU minutes.

Virtual time, so figures do not depend on the machine. FCFS, EDF and LRS against Medha's median TTFT from 1.25 QPS, EDF
against LARS at 0.25, the gain of multi-prefill batching at each rate (reported, not judged), and worst gaps. Ends with
1 when a bound is missed in both modes.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import msgspec

from headway.sim.report.console import show
from headway_research.base import RunOptions
from headway_research.registry import EXPERIMENTS, experiment
from headway_research.table import report_table

FIGURES = ("medha.fig13", "medha.fig10")
REPORTED = ("Multi-prefill batching", "SRPT", "5% long")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":", maxsplit=1)[0])
    parser.add_argument("--json", type=Path, help="write both reports")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    options = RunOptions(seeds=tuple(int(seed) for seed in arguments.seeds.split(",")), jobs=arguments.jobs)
    reports = [experiment(name)(options).to_json(name) for name in FIGURES]
    for report in reports:
        show(report_table(report, EXPERIMENTS[report["id"]].title))
    if arguments.json is not None:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(reports), indent=1) + b"\n")
    rows = [row for report in reports for row in report["rows"] if not row["claim"].startswith(REPORTED)]
    missed = [row["claim"] for row in rows if row["verdict"].startswith("not reproduced")]
    print(f"{len(rows) - len(missed)} of {len(rows)} bounds hold" + "".join(f"\n  missed: {claim}" for claim in missed))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
