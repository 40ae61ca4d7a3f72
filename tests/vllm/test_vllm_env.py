"""The environment that `make vllm` makes knows the entry points of this checkout, by which vLLM finds Headway."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripts import check_vllm_version, make_vllm_env


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


@pytest.mark.parametrize(
    ("others", "status"), [({}, 0), ({"0.33.0": 75}, 75), ({"0.29.0": 1, "0.33.0": 75}, 1), ({"0.29.0": -9}, 1)]
)
def test_the_other_known_versions_are_checked_and_one_without_a_wheel_hides_no_failure(
    others: dict[str, int], status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[str] = []

    def check(version: str, venv: Path | None) -> tuple[int, str]:
        checked.append(version)
        return others.get(version, 0), f"vLLM {version}"

    monkeypatch.setattr(check_vllm_version, "check", check)
    monkeypatch.setattr("sys.argv", ["check_vllm_version.py", "--tests", str(tmp_path)])
    (tmp_path / ".installed").write_text("0.32.0\n{}")
    assert check_vllm_version.main() == status
    assert sorted(checked) == ["0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.33.0"]
