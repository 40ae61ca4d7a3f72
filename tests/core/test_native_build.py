"""Cached compiled libraries: only this user's own are loaded."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import pytest

from headway.core import native_build
from headway.core.native_build import compiled

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(native_build, "FLAGS", ("-O0", "-fPIC"))
    path = tmp_path / "one.cpp"
    path.write_text('extern "C" int one() { return 1; }')
    return path


def test_a_library_is_built_once_in_a_private_folder(source: Path) -> None:
    (source.parent / "cache" / "headway").mkdir(parents=True, mode=0o777)
    (source.parent / "cache" / "headway").chmod(0o777)
    library = compiled("one", [source], "numbers")
    assert library is not None
    assert library.one() == 1
    (made,) = (source.parent / "cache" / "headway").glob("one-*.so")
    assert stat.S_IMODE(made.parent.stat().st_mode) == 0o700
    before = made.stat().st_ino
    assert compiled("one", [source], "numbers") is not None
    assert made.stat().st_ino == before


def test_a_file_that_others_could_have_written_is_built_anew(source: Path) -> None:
    compiled("one", [source], "numbers")
    (made,) = (source.parent / "cache" / "headway").glob("one-*.so")
    planted = source.parent / "planted.so"
    planted.write_bytes(b"no library")
    made.unlink()
    made.symlink_to(planted)
    assert compiled("one", [source], "numbers") is not None
    assert not made.is_symlink()
    made.chmod(0o777)
    assert compiled("one", [source], "numbers") is not None
    assert stat.S_IMODE(made.stat().st_mode) & 0o022 == 0


def test_a_folder_of_another_user_is_not_used(
    source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiled("one", [source], "numbers")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert compiled("one", [source], "numbers") is None
    assert "not a folder of this user" in caplog.text
    # A link in its place leads elsewhere.
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(source.parent / "other"))
    (source.parent / "other").mkdir()
    (source.parent / "other" / "headway").symlink_to(source.parent)
    assert compiled("one", [source], "numbers") is None
