"""Files of results: missing folders are made, a refusal comes before the work and is one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.core.errors import ConfigError
from headway.core.files import check_outputs, write_output


def test_missing_folders_are_made_and_the_file_is_written_whole(tmp_path: Path) -> None:
    file = tmp_path / "new" / "deep" / "result.json"
    write_output(file, b"one")
    write_output(file, b"two")
    assert file.read_bytes() == b"two"
    assert [each.name for each in file.parent.iterdir()] == ["result.json"]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "real")
    write_output(link, b"one")
    assert link.is_symlink()
    assert (tmp_path / "real").read_bytes() == b"one"


def test_what_is_no_file_and_stdout_are_let_through() -> None:
    check_outputs(None, Path("-"))
    write_output(Path("/dev/null"), b"one")


def test_a_file_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"cannot write .*/file/x: (File exists|Not a directory)"):
        check_outputs(tmp_path / "file" / "x")
    with pytest.raises(ConfigError, match="it is a folder; name a file in it"):
        check_outputs(tmp_path)
