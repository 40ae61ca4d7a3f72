"""The list of vLLM's flags that `headway serve` reads, against the installed vLLM."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm.config", reason="vLLM is not in this environment: make test-vllm")

pytestmark = pytest.mark.long


def test_the_list_of_flags_is_that_of_the_installed_vllm() -> None:
    script = Path(__file__).resolve().parents[3] / "scripts" / "make_vllm_flags.py"
    subprocess.run([sys.executable, str(script), "--check"], check=True)
