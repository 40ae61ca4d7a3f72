"""Regenerate the figures that README and docs show: `make figures`. Takes about half a minute on 2 cores.

docs/figures/convoy.png, and the numbers behind it in convoy.json, come from `headway demo` on this machine.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

FIGURES = Path(__file__).resolve().parents[1] / "docs" / "figures"


def main() -> int:
    FIGURES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "headway.cli.main", "demo", "--out", folder]
        status = subprocess.run(command, check=False).returncode
        if status == 0:
            for name in ("convoy.png", "convoy.json"):
                shutil.copy(Path(folder) / name, FIGURES / name)
    return status


if __name__ == "__main__":
    sys.exit(main())
