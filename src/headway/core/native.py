"""Optional C++: a source file compiled once for the processor at hand, and never required."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC")
_log = logging.getLogger("headway.native")


def compiled(source: Path, what: str, extra: Sequence[str] = ()) -> ctypes.CDLL | None:
    """The library of a C++ file, or None where it cannot be built; then says once that `what` is off.

    The first call ever compiles for some seconds. HEADWAY_NATIVE=0 in the environment turns all of it off. Libraries
    are kept in the user's cache folder under a name made of source, compiler, flags and processor; several processes
    may build one at once. `extra`: flags for compiling besides `FLAGS`.
    """
    if os.environ.get("HEADWAY_NATIVE", "1") == "0":
        return None
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")
    if compiler is None:
        _log.info("no C++ compiler: %s are off", what)
        return None
    try:
        return ctypes.CDLL(str(_build(compiler, source, extra)))
    except (OSError, subprocess.SubprocessError) as error:
        _log.warning("%s are off: %s", what, getattr(error, "stderr", None) or error)
        return None


def _build(compiler: str, source: Path, extra: Sequence[str]) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headway"
    identity = [source.read_text(), compiler, *FLAGS, *extra, platform.machine(), _processor()]
    target = cache / f"{source.stem}-{hashlib.sha256(chr(0).join(identity).encode()).hexdigest()[:16]}.so"
    if target.is_file():
        return target
    cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        done, linked = Path(folder) / "part.o", Path(folder) / "part.so"
        for step in (
            (compiler, *FLAGS, *extra, "-c", str(source), "-o", str(done)),
            (compiler, "-shared", str(done), "-o", str(linked)),
        ):
            subprocess.run(step, check=True, capture_output=True, text=True, timeout=120)
        os.replace(linked, target)
    return target


def _processor() -> str:
    """What -march=native depends on: the instruction sets of the first processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith("flags")), platform.processor())
