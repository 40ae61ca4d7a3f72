from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.fixture(scope="session")
def traces() -> Path:
    """The real traces, where this machine has them: SHARED_DATA, or `shared` beside the repository."""
    shared = os.environ.get("SHARED_DATA") or str(Path(__file__).resolve().parents[3] / "shared")
    folder = Path(shared) / "data" / "traces"
    if not folder.is_dir():
        pytest.skip("no real traces on this machine")
    return folder
