"""Every tensor of a rank is on the device on which the rank computes, or moved there: checked without such a device."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.helpers.checkpoints import make_tiny


@pytest.mark.long
def test_every_tensor_is_where_it_has_to_be(tmp_path: Path) -> None:
    """In a process of its own, because it teaches torch a device."""
    from torch.utils import backend_registration

    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip("this torch cannot make up a device in Python")
    folders = [str(make_tiny(family, tmp_path / family, num_hidden_layers=2)) for family in ("llama", "qwen3")]
    done = subprocess.run(
        [sys.executable, "-m", "tests.parallel.device_placement", *folders],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "every tensor is where it has to be" in done.stdout
