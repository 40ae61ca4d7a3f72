"""Scratch folders: removed on close, and after a kill by the next process; never while their lock is held."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway.core.errors import ConfigError
from headway.core.files import ScratchFolder


@pytest.fixture(autouse=True)
def root(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr("tempfile.tempdir", None)
        yield Path(folder)
    monkeypatch.undo()


def aged(folder: Path) -> None:
    long_ago = time.time() - 3600
    os.utime(folder / "lock", (long_ago, long_ago))


def test_close_removes_the_folder_and_may_be_repeated() -> None:
    folder = ScratchFolder("headway-engine-")
    (folder.path / "socket").touch()
    folder.close()
    folder.close()
    assert not folder.path.exists()


def test_folder_of_a_killed_process_is_removed_and_of_a_live_one_kept(root: Path) -> None:
    code = (
        "import signal, sys; from headway.core.files import ScratchFolder; "
        "folder = ScratchFolder(sys.argv[1]); print(folder.path, flush=True); signal.pause()"
    )
    child = subprocess.Popen([sys.executable, "-c", code, "headway-engine-"], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    theirs = Path(child.stdout.readline().strip())
    other = root / "headway-engine-notes"
    other.mkdir()
    aged(theirs)
    ScratchFolder("headway-engine-").close()
    assert theirs.exists()
    child.kill()
    child.wait()
    child.stdout.close()
    ScratchFolder("headway-other-").close()
    assert theirs.exists()
    ScratchFolder("headway-engine-").close()
    assert not theirs.exists()
    assert other.exists()


def test_folder_younger_than_a_minute_is_kept_without_a_lock(root: Path) -> None:
    young = root / "headway-engine-young"
    young.mkdir()
    (young / "lock").touch()
    ScratchFolder("headway-engine-").close()
    assert young.exists()
    aged(young)
    ScratchFolder("headway-engine-").close()
    assert not young.exists()


def test_temporary_path_too_long_for_sockets_is_a_config_error(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = root / ("d" * 75)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with pytest.raises(ConfigError, match="TMPDIR"):
        ScratchFolder("headway-engine-")


def test_a_killed_engine_with_ranks_leaves_no_folder_of_multiprocessing(root: Path) -> None:
    code = (
        "import os, signal; from headway.runtime.launcher import processes as ranks; "
        "ranks.RANK = 'json'; ranks.warm(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code], check=False)
    (left,) = root.iterdir()
    aged(left)
    ScratchFolder("headway-ranks-").close()
    assert not list(root.iterdir())
