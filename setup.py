"""What pyproject.toml cannot say of a wheel: the examples are in it, and compiled libraries where they are asked for.

HEADWAY_PREBUILT=1 compiles `core.native_build.LIBRARIES` for x86-64; the wheel is then of that platform, of any Python.
HEADWAY_COMPILED=1 adds policies and simulator as machine code (scripts/compiled_modules.py) for the Python that builds it;
any other runs them interpreted.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "scripts")]
PREBUILT = os.environ.get("HEADWAY_PREBUILT", "0") != "0"
COMPILED = os.environ.get("HEADWAY_COMPILED", "0") != "0"


class BuildWithExamples(build_py):
    """Copies the examples into the package, and compiles where asked."""

    def run(self) -> None:
        if self.editable_mode:
            super().run()
            return
        # What an earlier build compiled would be loaded in place of newer source.
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()
        package = Path(self.build_lib) / "headway"
        shutil.copytree(ROOT / "examples", package / "examples", dirs_exist_ok=True,
                        ignore=shutil.ignore_patterns("__pycache__", "*.ipynb_checkpoints"))  # fmt: skip
        if PREBUILT:
            self.add_libraries(package)
        if COMPILED:
            self.compile_modules()

    def add_libraries(self, package: Path) -> None:
        from headway.core.native_build import LIBRARIES, PACKAGE, build, find_compiler

        compiler = find_compiler()
        if compiler is None:
            raise SystemExit("HEADWAY_PREBUILT=1 needs a C++ compiler: install g++, or leave it out")
        for library in LIBRARIES.values():
            target = package / library.prebuilt().relative_to(PACKAGE)
            target.parent.mkdir(parents=True, exist_ok=True)
            build(compiler, library, target, library.portable)

    def compile_modules(self) -> None:
        from compiled_modules import can_compile, compile_modules

        if not can_compile():
            raise SystemExit(
                "HEADWAY_COMPILED=1 needs a C compiler, and here, with --no-build-isolation: "
                "pip install 'setuptools>=77' mypy numpy msgspec"
            )
        compile_modules(Path(self.build_lib))


class PlatformDistribution(Distribution):
    """Says that there is machine code, without which the wheel would be one for all platforms."""

    def has_ext_modules(self) -> bool:
        return PREBUILT or COMPILED


class PlatformWheel(bdist_wheel):
    """Names the platform, and no Python: libraries are called through ctypes, and modules are loaded where they fit."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2]) if PREBUILT or COMPILED else super().get_tag()


setup(distclass=PlatformDistribution, cmdclass={"build_py": BuildWithExamples, "bdist_wheel": PlatformWheel})
