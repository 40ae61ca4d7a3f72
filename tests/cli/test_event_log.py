"""An event log has one writer, and the log of an earlier run is kept."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headway.core.errors import ConfigError
from headway.core.logs import open_event_log

HOLD = "import sys; from headway.core.logs import open_event_log as o; f = o(sys.argv[1]); f.write(b'a\\n'); "


def test_a_log_of_an_earlier_run_is_kept_beside_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "log"
    for words in (b"first\n", b"second\n", b"third\n"):
        with open_event_log(str(path)) as file:
            file.write(words)
        os.utime(path, (1e9, 1e9))
    with open_event_log(str(path)):
        pass
    with open_event_log(str(path)) as file:  # what is empty is nobody's
        file.write(b"now\n")
    kept = {each.name: each.read_bytes() for each in tmp_path.iterdir()}
    assert kept == {
        "log": b"now\n",
        "log.until-20010909T014640Z": b"first\n",
        "log.until-20010909T014640Z-2": b"second\n",
        "log.until-20010909T014640Z-3": b"third\n",
    }


def test_a_log_that_another_process_writes_to_is_refused_until_that_has_ended(tmp_path: Path) -> None:
    path = str(tmp_path / "log")
    words = [sys.executable, "-c", HOLD + "print(1, flush=True); sys.stdin.read()", path]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline() == b"1\n"
        with pytest.raises(ConfigError, match=f"another process writes to {path}: give each its own file"):
            open_event_log(path, attempts=0)
        assert [each.name for each in tmp_path.iterdir()] == ["log"]
        other.stdin.close()  # it ends while the next one waits
        with open_event_log(path) as file:
            file.write(b"b\n")
    assert sorted(each.read_bytes() for each in tmp_path.iterdir()) == [b"a\n", b"b\n"]


def test_links_are_kept_and_pipes_are_written_to_directly(tmp_path: Path) -> None:
    folder, link = tmp_path / "disk", tmp_path / "log"
    folder.mkdir()
    link.symlink_to(folder / "real")
    for _ in range(2):
        with open_event_log(str(link)) as file:
            file.write(b"a\n")
    assert link.is_symlink()
    assert sorted(each.read_bytes() for each in folder.iterdir()) == [b"a\n", b"a\n"]
    with open_event_log("/dev/null") as one, open_event_log("/dev/null") as other:
        one.write(b"a")
        other.write(b"b")


def test_a_path_that_cannot_be_opened_is_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"event-log: .*: (File exists|Not a directory)"):
        open_event_log(str(tmp_path / "file" / "log"))


def test_missing_folders_of_a_log_are_made(tmp_path: Path) -> None:
    with open_event_log(str(tmp_path / "new" / "deep" / "log")) as file:
        file.write(b"a\n")
    assert (tmp_path / "new" / "deep" / "log").read_bytes() == b"a\n"
