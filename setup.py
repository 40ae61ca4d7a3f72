"""What pyproject.toml cannot say of a wheel: the examples are in it, and machine code.

Policies and simulator are compiled for the Python that builds the wheel (scripts/compiled_modules.py). Where that is
not possible, and with HEADWAY_COMPILED=0, they stay interpreted, and the wheel is of any Python. HEADWAY_PREBUILT=1
compiles `core.native_build.LIBRARIES` for x86-64 too; the wheel is then of that platform.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "scripts")]
PREBUILT = os.environ.get("HEADWAY_PREBUILT", "0") != "0"
COMPILED = os.environ.get("HEADWAY_COMPILED", "1") != "0"


class BuildWithExamples(build_py):
    """Copies the examples into the package, and compiles."""

    # Whether the modules are compiled.
    compiled = False

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
            print("Policies stay interpreted: to compile them install a C compiler, mypy, numpy and msgspec.")
            return
        try:
            compile_modules(Path(self.build_lib))
        except (subprocess.CalledProcessError, OSError) as error:
            print(f"Policies stay interpreted, since they could not be compiled here: {error}")
        else:
            self.compiled = True


class PlatformDistribution(Distribution):
    """Says that there may be machine code; `PlatformWheel` knows."""

    def has_ext_modules(self) -> bool:
        return PREBUILT or COMPILED


class PlatformWheel(bdist_wheel):
    """Is for one Python where modules are compiled; other libraries are called through ctypes, from any Python."""

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, platform = super().get_tag()
        if self.get_finalized_command("build_py").compiled:
            return python, abi, platform
        return "py3", "none", platform if PREBUILT else "any"


setup(distclass=PlatformDistribution, cmdclass={"build_py": BuildWithExamples, "bdist_wheel": PlatformWheel})
