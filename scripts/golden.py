"""Write the simulator's figures, or compare them with those written before, byte for byte.

    python scripts/golden.py write DIR [ID …]      # before a change
    python scripts/golden.py compare DIR [ID …]    # after it; exit code 1 when any file differs

Covers every example scenario (results, requests, trace) and every experiment of `headway reproduce` in its quick form.
Nothing is timed, so two runs of the same code give the same bytes.
"""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path

import msgspec

from headway.cli.main import main as headway
from headway_research.base import RunOptions
from headway_research.registry import experiment, names

EXAMPLES = Path(__file__).parent.parent / "examples"


def figures(name: str, folder: Path) -> list[Path]:
    """Write the files of one scenario or experiment below `folder` and return their paths."""
    if not name.endswith(".yaml"):
        data = experiment(name)(RunOptions(quick=True)).to_json(name)
        path = folder / f"{name}.json"
        path.write_bytes(msgspec.json.format(msgspec.json.encode(data), indent=1) + b"\n")
        return [path]
    results, requests, trace = (folder / f"{name}.{kind}" for kind in ("json", "csv", "trace"))
    flags = ["--json", str(results), "--requests", str(requests), "--trace", str(trace)]
    with contextlib.redirect_stdout(io.StringIO()):
        headway(["simulate", str(EXAMPLES / name), "--jobs", "1", *flags])
    return [results, requests, trace]


def _is_scenario(text: str) -> bool:
    """Whether an example is of `headway simulate`: others are of `headway cluster` and `headway plan`."""
    return "\nworkload:" in text and "\ndemands:" not in text


def main(verb: str, root: str, *chosen: str) -> int:
    """Write or compare the chosen names (all, when none is given); return the exit code."""
    folder = Path(root) / ("golden" if verb == "write" else "now")
    folder.mkdir(parents=True, exist_ok=True)
    differing = 0
    scenarios = sorted(path.name for path in EXAMPLES.glob("*.yaml") if _is_scenario(path.read_text()))
    for name in chosen or (*scenarios, *names()):
        for path in figures(name, folder):
            same = verb == "write" or path.read_bytes() == (Path(root) / "golden" / path.name).read_bytes()
            differing += not same
            print(f"{'ok' if same else 'DIFFERS'} {path}", flush=True)
    return int(differing > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
