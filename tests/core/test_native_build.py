"""Cached compiled libraries: only this user's own are loaded."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest
from tests.helpers.present import present

from headway.core import native_build
from headway.core.native_build import LIBRARIES, NativeLibrary, build, compiled, find_compiler
from headway.runtime.attention.native import CompiledKernels

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library's only source file; `one_of` names the library."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(native_build, "FLAGS", ("-O0", "-fPIC"))
    path = tmp_path / "one.cpp"
    path.write_text('extern "C" int one() { return 1; }')
    monkeypatch.setattr(native_build, "PREBUILT", tmp_path / "prebuilt")
    return path


def one_of(source: Path) -> NativeLibrary:
    return NativeLibrary(name="one", folder=source.parent, pattern="one.cpp", what="numbers", portable=("-DPORTABLE",))


def test_a_library_is_built_once_in_a_private_folder(source: Path) -> None:
    (source.parent / "cache" / "headway").mkdir(parents=True, mode=0o777)
    (source.parent / "cache" / "headway").chmod(0o777)
    library = present(compiled(one_of(source)))
    assert library.one() == 1
    (made,) = (source.parent / "cache" / "headway").glob("one-*.so")
    assert stat.S_IMODE(made.parent.stat().st_mode) == 0o700
    before = made.stat().st_ino
    assert compiled(one_of(source)) is not None
    assert made.stat().st_ino == before


def test_a_library_is_built_again_when_the_compiler_was_replaced(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\nexec g++ "$@"')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert compiled(one_of(source)) is not None
    compiler.write_text('#!/bin/sh\n# the next version\nexec g++ "$@"')
    assert compiled(one_of(source)) is not None
    assert len(list((tmp_path / "cache" / "headway").glob("one-*.so"))) == 2


def test_what_the_assembler_does_not_know_is_left_out(source: Path) -> None:
    newer = 'asm volatile("not_an_instruction");'
    source.write_text(f'extern "C" int one() {{\n#ifdef OLDER\n return 2;\n#else\n {newer} return 1;\n#endif\n}}')
    assert compiled(one_of(source)) is None
    library = present(compiled(dataclasses.replace(one_of(source), reduced=("-DOLDER",))))
    assert library.one() == 2


def test_steps_are_reported_while_a_library_is_built_and_not_afterwards(source: Path) -> None:
    steps: list[tuple[int, int]] = []
    for _ in range(2):
        compiled(one_of(source), lambda done, total: steps.append((done, total)))
    # One file to compile, and linking.
    assert steps == [(0, 2), (1, 2)]


def test_a_file_that_others_could_have_written_is_built_anew(source: Path) -> None:
    compiled(one_of(source))
    (made,) = (source.parent / "cache" / "headway").glob("one-*.so")
    planted = source.parent / "planted.so"
    planted.write_bytes(b"no library")
    made.unlink()
    made.symlink_to(planted)
    assert compiled(one_of(source)) is not None
    assert not made.is_symlink()
    made.chmod(0o777)
    assert compiled(one_of(source)) is not None
    assert stat.S_IMODE(made.stat().st_mode) & 0o022 == 0


def test_a_folder_of_another_user_is_not_used(
    source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiled(one_of(source))
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert compiled(one_of(source)) is None
    assert "not a folder of this user" in caplog.text
    # A link in its place leads elsewhere.
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(source.parent / "other"))
    (source.parent / "other").mkdir()
    (source.parent / "other" / "headway").symlink_to(source.parent)
    assert compiled(one_of(source)) is None


def prebuilt(source: Path) -> Path:
    """Build what a wheel would hold."""
    library, compiler = one_of(source), find_compiler()
    assert compiler is not None
    library.prebuilt().parent.mkdir(exist_ok=True)
    build(compiler, library, library.prebuilt(), library.portable)
    return library.prebuilt()


def test_a_wheel_s_library_is_loaded_and_nothing_is_compiled(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source.write_text('extern "C" int one() {\n#ifdef PORTABLE\n return 2;\n#else\n return 1;\n#endif\n}')
    prebuilt(source)
    monkeypatch.setenv("PATH", "")
    library = present(compiled(one_of(source)))
    assert library.one() == 2
    assert not (source.parent / "cache").exists()


def test_a_wheel_s_library_of_other_sources_is_left_alone(source: Path) -> None:
    prebuilt(source)
    source.write_text('extern "C" int one() { return 3; }')
    library = present(compiled(one_of(source)))
    assert library.one() == 3


def test_a_wheel_s_library_that_cannot_be_loaded_is_compiled_here(source: Path) -> None:
    prebuilt(source).write_bytes(b"for another system")
    library = present(compiled(one_of(source)))
    assert library.one() == 1


def test_every_library_of_a_wheel_has_sources_and_a_name_of_its_own() -> None:
    assert all(library.sources() for library in LIBRARIES.values())
    assert len({library.prebuilt() for library in LIBRARIES.values()}) == len(LIBRARIES) == 4


@pytest.mark.long
def test_a_compiler_older_than_amx_gives_the_bf16_kernels_by_vectors(tmp_path: Path) -> None:
    library = LIBRARIES["kernels"]
    older = dataclasses.replace(library, flags=(*library.flags, "-O0", "-DHEADWAY_TILES=0"))
    build("g++", older, tmp_path / "older.so", older.portable)
    listing = subprocess.run(
        ["objdump", "-d", tmp_path / "older.so"], capture_output=True, text=True, check=True
    ).stdout
    assert "vdpbf16ps" in listing
    assert "tmm0" not in listing
    assert "tilecfg" not in listing
    assert not CompiledKernels(ctypes.CDLL(str(tmp_path / "older.so")), tiles=True).tiles
