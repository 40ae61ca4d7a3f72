"""Run experiments in full and keep what they gave: `python scripts/record_reproductions.py medha.fig13 pecsched`.

A paper's name stands for all its experiments, `all` for every paper's; simulations that experiments share run once. A
file of `headway reproduce ID --json FILE.json` is kept in place of a run. Then write down why each new failing row
fails (src/headway_research/causes.yaml), and `make docs`.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from headway_research.base import RunOptions
from headway_research.recorded import RECORDED, cause_of, recorded, to_record, write
from headway_research.registry import EXPERIMENTS, experiment


def main(*wanted: str) -> int:
    """Run the experiments, merge them into the record, name the failing rows that have no cause yet."""
    given = {data["id"]: data for file in wanted if file.endswith(".json") for data in [_read(file)]}
    names = [
        name
        for name in EXPERIMENTS
        if "all" in wanted or name in wanted or name in given or name.partition(".")[0] in wanted
    ]
    if not names:
        print("name experiments of `headway reproduce --list`, papers, or all")
        return 2
    for name in names:
        began_s = time.process_time()
        full = given.get(name) or experiment(name)(RunOptions(stopwatch=time.perf_counter)).to_json(name)
        took_s = time.process_time() - began_s
        # after the full run, which pays for what both simulate
        quick = experiment(name)(RunOptions(quick=True)).to_json(name)
        run = to_record(full, quick, round(took_s, 1))
        # read again each time: another process may have recorded meanwhile
        recorded.cache_clear()
        kept = dict(recorded() if RECORDED.exists() else {}) | {name: run}
        write({each: kept[each] for each in EXPERIMENTS if each in kept})
        print(f"{name}: {run.verdict()}, {run.cpu_s:g} CPU-s", flush=True)
        for row in run.rows:
            if row.state == "fails" and cause_of(name, row.claim) is None:
                print(f"  no cause: {row.claim}: {row.verdict}", flush=True)
    return 0


def _read(file: str) -> dict[str, Any]:
    data: dict[str, Any] = msgspec.json.decode(Path(file).read_bytes())
    return data


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
