"""`headway completion`: what a real shell completes."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from headway.cli.main import COMMANDS, SHELLS, main, script


def completed(words: list[str], folder: Path) -> list[str]:
    """What bash offers for the last of the words."""
    (folder / "completion").write_text(script("bash"))
    line = f"""
source completion
COMP_WORDS=({" ".join(repr(word) for word in words)}) COMP_CWORD={len(words) - 1}
$(complete -p headway | sed -E 's/.*-F ([^ ]+).*/\\1/')
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(["bash", "-c", line], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash_completes_commands_flags_and_files(tmp_path: Path) -> None:
    assert {"simulate", "serve", "plan"} <= set(completed(["headway", ""], tmp_path))
    assert completed(["headway", "sim"], tmp_path) == ["simulate"]
    assert "--max-model-len" in completed(["headway", "serve", "--max-m"], tmp_path)
    (tmp_path / "question.yaml").touch()
    assert "question.yaml" in completed(["headway", "plan", "ques"], tmp_path)


@pytest.mark.parametrize("shell", SHELLS)
def test_each_shell_has_a_script_with_every_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in COMMANDS)


def test_an_unknown_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["completion", "cmd"])
    assert "choose from" in capsys.readouterr().err
