"""`make bench`: the live engine's figures in README and docs/reference/performance.md, on this machine.

Run it on an otherwise idle machine; each script prints its own conditions.
"""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

STEPS = (
    ("Serving", [sys.executable, "-m", "benchmarks.serving"]),
    ("Decode step", [sys.executable, "benchmarks/decode_step.py"]),
    ("Attention efficiency", [sys.executable, "benchmarks/attention_efficiency.py"]),
    (
        "Convoy",
        [
            sys.executable, "-m", "headway.cli.main", "bench", "convoy", "--model", "out/reference",
            "--long-tokens", "32768", "--policies", "ladder,fcfs", "--json", "out/convoy-reference.json",
            "--report", "out/convoy-reference.html",
        ],
    ),
)  # fmt: skip


def main() -> int:
    cpu = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "")
    print(
        f"{platform.platform()}, {cpu.partition(':')[2].strip()}, load {Path('/proc/loadavg').read_text().split()[0]}"
    )
    failed = 0
    for title, command in STEPS:
        print(f"\n== {title}", flush=True)
        failed += subprocess.run(command, check=False).returncode != 0
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
