"""Optional C++: source files compiled once for the processor at hand, and never required."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC")
_log = logging.getLogger("headway.native")


def compiled(
    name: str, sources: Sequence[Path], what: str, *, headers: Sequence[Path] = (), flags: Sequence[str] = ()
) -> ctypes.CDLL | None:
    """The library of some C++ files, or None where it cannot be built; then it is logged that `what` are off.

    The first call ever compiles for some seconds. HEADWAY_NATIVE=0 in the environment turns all of it off. The library
    is kept in the user's cache folder under `name` and a hash of sources, compiler, flags and processor; several
    processes may build it at once. `flags`: for compiling, besides `FLAGS`.
    """
    if os.environ.get("HEADWAY_NATIVE", "1") == "0":
        return None
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")
    if compiler is None:
        _log.info("no C++ compiler: %s are off", what)
        return None
    try:
        return ctypes.CDLL(str(_build(compiler, name, sources, headers, flags)))
    except (OSError, subprocess.SubprocessError) as error:
        _log.warning("%s are off: %s", what, getattr(error, "stderr", None) or error)
        return None


def _build(compiler: str, name: str, sources: Sequence[Path], headers: Sequence[Path], flags: Sequence[str]) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headway"
    texts = [path.read_text() for path in (*sources, *headers)]
    # Everything that the machine code depends on.
    identity = [*texts, compiler, *FLAGS, *flags, platform.machine(), _processor()]
    target = cache / f"{name}-{hashlib.sha256(chr(0).join(identity).encode()).hexdigest()[:16]}.so"
    _make_private(cache)
    if _is_own(target):
        return target
    _log.info("compiling %s for this processor, once: it takes some seconds", name)
    with tempfile.TemporaryDirectory(dir=cache) as folder, ThreadPoolExecutor(len(sources)) as side_by_side:
        objects = [str(Path(folder) / f"{path.stem}.o") for path in sources]
        linked = Path(folder) / "linked.so"
        steps = [
            (compiler, *FLAGS, *flags, "-c", str(path), "-o", made) for path, made in zip(sources, objects, strict=True)
        ]
        list(side_by_side.map(_compile, steps))
        _compile((compiler, "-shared", *objects, "-o", str(linked)))
        # Atomic: processes that build at once replace each other's equal file, and none loads half of one.
        os.replace(linked, target)
    return target


def _make_private(cache: Path) -> None:
    """Make the folder, or close an open one to others: no other user may plant a library. Raises OSError."""
    cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = cache.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise OSError(f"{cache} is not a folder of this user; remove it, or set XDG_CACHE_HOME")
    if stat.S_IMODE(found.st_mode) & 0o077:
        cache.chmod(0o700)


def _is_own(library: Path) -> bool:
    """Whether the file is there, is no link, and only this user can have written it; else it is built anew."""
    try:
        found = library.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022


def _compile(step: tuple[str, ...]) -> None:
    subprocess.run(step, check=True, capture_output=True, text=True, timeout=120)


def _processor() -> str:
    """What -march=native depends on: the instruction sets of the first processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith("flags")), platform.processor())
