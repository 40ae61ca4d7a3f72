"""The import path of processes that tests start."""

from __future__ import annotations

import os
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def python_path() -> str:
    """Return the `PYTHONPATH` under which a child process finds `tests.helpers` and the package under test."""
    return os.pathsep.join(filter(None, (str(REPOSITORY), str(REPOSITORY / "src"), os.environ.get("PYTHONPATH"))))
