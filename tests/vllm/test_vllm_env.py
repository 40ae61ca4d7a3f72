"""The environment that `make vllm` makes knows the entry points of this checkout, by which vLLM finds Headway."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripts import make_vllm_env


def test_new_entry_points_install_headway_again_without_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed: list[str] = []
    monkeypatch.setattr(make_vllm_env, "_pip", lambda python, *words: installed.append(words[-1]))
    monkeypatch.setattr("sys.argv", ["make_vllm_env.py", str(tmp_path)])
    (tmp_path / ".installed").write_text("0.32.0")
    kept = tmp_path / "vllm"
    kept.touch()
    assert make_vllm_env.main() == 0
    assert (installed, kept.exists()) == ([str(make_vllm_env.ROOT)], True)
    assert "headway.vllm.metrics:HeadwayStatLogger" in (tmp_path / ".installed").read_text()
    assert make_vllm_env.main() == 0
    assert len(installed) == 1
