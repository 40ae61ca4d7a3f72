"""Engine processes started by these tests import `tests.helpers`."""

from __future__ import annotations

import pytest
from tests.helpers.child_processes import python_path


@pytest.fixture(autouse=True)
def _helpers_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", python_path())
