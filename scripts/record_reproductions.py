"""Keep what full runs gave: `headway reproduce all --json DIR`, then `python scripts/record_reproductions.py DIR`.

Experiments that DIR lacks keep what was recorded of them before. A run with --quick is not a reproduction: do not
record it. Then write down why each new failing row fails (src/headway_research/causes.yaml), and `make docs`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from headway_research.recorded import RECORDED, cause_of, to_record
from headway_research.registry import EXPERIMENTS


def main(folder: str) -> int:
    """Merge the results of a folder into the record; name the failing rows that have no cause yet."""
    kept = msgspec.json.decode(RECORDED.read_bytes()) if RECORDED.exists() else {}
    new = [msgspec.json.decode(path.read_bytes()) for path in sorted(Path(folder).glob("*.json"))]
    kept |= {data["id"]: to_record(data) for data in new}
    kept = {name: kept[name] for name in EXPERIMENTS if name in kept}
    RECORDED.write_bytes(msgspec.json.format(msgspec.json.encode(kept), indent=1) + b"\n")
    for name, run in kept.items():
        for row in run["failing"]:
            if cause_of(name, row["claim"]) is None:
                print(f"no cause: {name}: {row['claim']}")
    print(f"{len(new)} recorded, {len(EXPERIMENTS) - len(kept)} experiments without a full run")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
