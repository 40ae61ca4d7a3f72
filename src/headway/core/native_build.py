"""Optional C++: compiled before, in a wheel, or once for the processor at hand; never required."""

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
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
PREBUILT = PACKAGE / "core" / "prebuilt"
"""Libraries that came with a platform wheel; absent in a checkout."""
FLAGS = ("-O3", "-std=c++17", "-fPIC")
_log = logging.getLogger("headway.native")


@dataclass(frozen=True, kw_only=True)
class NativeLibrary:
    """A library of C++ files."""

    name: str
    folder: Path
    pattern: str
    """Its source files in `folder`, as a glob; all headers there belong to it."""
    what: str
    """What is off without it, for the log."""
    flags: tuple[str, ...] = ()
    """For compiling, besides `FLAGS` and the processor's."""
    portable: tuple[str, ...]
    """The processor's flags in a wheel for x86-64, in place of -march=native."""
    reduced: tuple[str, ...] = ()
    """Flags to add for a second try, where compiler or assembler are too old for all of it."""

    def sources(self) -> list[Path]:
        return sorted(self.folder.glob(self.pattern))

    def texts(self) -> list[str]:
        return [path.read_text() for path in (*self.sources(), *sorted(self.folder.glob("*.h")))]

    def prebuilt(self) -> Path:
        """Return where a wheel has it: under a hash of sources and flags, so that no stale one is loaded."""
        return PREBUILT / f"{self.name}-{_hash([*self.texts(), *FLAGS, *self.flags, *self.portable])}.so"


LIBRARIES = {
    library.name: library
    for library in (
        NativeLibrary(
            name="kernels",
            folder=PACKAGE / "runtime" / "attention" / "native",
            pattern="bf16_*.cpp",
            what="compiled kernels",
            flags=("-fopenmp",),
            portable=("-march=x86-64-v4", "-mavx512bf16"),
            # A compiler may know AMX, and the assembler behind it may not.
            reduced=("-DHEADWAY_TILES=0",),
        ),
        *(
            NativeLibrary(
                name=f"fp32-{name}",
                folder=PACKAGE / "runtime" / "attention" / "native",
                pattern="fp32_*.cpp",
                what="compiled fp32 kernels",
                flags=("-fopenmp",),
                portable=(f"-march=x86-64-{level}",),
            )
            for name, level in (("avx2", "v3"), ("avx512", "v4"))
        ),
        NativeLibrary(
            name="cdsp",
            folder=PACKAGE / "policy" / "placement",
            pattern="cdsp_search.cpp",
            what="compiled cluster plans",
            # No fused multiply-add: plans must equal the Python search bit by bit.
            flags=("-ffp-contract=off",),
            portable=("-march=x86-64-v2",),
        ),
    )
}
"""What a platform wheel has compiled, by name."""


Done = Callable[[int, int], object]
"""Called with the steps that are done, and all, while a library is compiled."""


def compiled(library: NativeLibrary, done: Done | None = None, native: bool = True) -> ctypes.CDLL | None:
    """Return a library, from the wheel or else compiled here; None where it cannot be, and a line in the log says why.

    The first call ever without a wheel's library compiles for some seconds. HEADWAY_NATIVE=0 in the environment turns
    all of it off. A compiled library is kept in the user's cache folder under its name and a hash of sources, compiler,
    flags and processor; several processes may build it at once. native: with all that this processor has; otherwise as
    in a wheel.
    """
    if os.environ.get("HEADWAY_NATIVE", "1") == "0":
        return None
    try:
        if library.prebuilt().exists():
            return ctypes.CDLL(str(library.prebuilt()))
    except OSError as error:
        # Such as a C library older than the wheel's.
        _log.info("the wheel's %s cannot be loaded, so they are compiled here: %s", library.what, error)
    compiler = find_compiler()
    if compiler is None:
        _log.info("no C++ compiler: %s are off", library.what)
        return None
    try:
        return ctypes.CDLL(str(_cached(compiler, library, done, ("-march=native",) if native else library.portable)))
    except (OSError, subprocess.SubprocessError) as error:
        _log.warning("%s are off: %s", library.what, getattr(error, "stderr", None) or error)
        return None


def find_compiler() -> str | None:
    """Return the C++ compiler: $CXX, g++ or c++."""
    return shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")


def _cached(compiler: str, library: NativeLibrary, done: Done | None, processor: Sequence[str]) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headway"
    # Everything that the machine code depends on.
    made_by = [*_version(compiler), *FLAGS, *library.flags, *processor]
    identity = _hash([*library.texts(), *made_by, platform.machine(), _processor()])
    target = cache / f"{library.name}-{identity}.so"
    _make_private(cache)
    if _is_own(target):
        return target
    _log.info("compiling %s for this processor, once: it takes some seconds", library.name)
    try:
        build(compiler, library, target, processor, done)
    except subprocess.CalledProcessError as error:
        if not library.reduced:
            raise
        _log.info("compiling %s again with %s: %s", library.name, " ".join(library.reduced), error.stderr)
        build(compiler, library, target, (*processor, *library.reduced), done)
    return target


def build(
    compiler: str, library: NativeLibrary, target: Path, processor: Sequence[str], done: Done | None = None
) -> None:
    """Compile a library to `target` in an existing folder. processor: flags that name it. Raises SubprocessError."""
    sources = library.sources()
    with tempfile.TemporaryDirectory(dir=target.parent) as folder, ThreadPoolExecutor(len(sources)) as side_by_side:
        objects = [str(Path(folder) / f"{path.stem}.o") for path in sources]
        linked = Path(folder) / "linked.so"
        steps = [
            (compiler, *FLAGS, *processor, *library.flags, "-c", str(path), "-o", made)
            for path, made in zip(sources, objects, strict=True)
        ]
        for count, _ in enumerate(chain([None], side_by_side.map(_compile, steps))):
            if done is not None:
                # Linking is the last step.
                done(count, len(steps) + 1)
        # OpenMP's runtime is torch's, which is loaded first: not linked in, or a process would have two.
        _compile((compiler, "-shared", *objects, "-o", str(linked)))
        # Atomic: processes that build at once replace each other's equal file, and none loads half of one.
        os.replace(linked, target)


def _version(compiler: str) -> tuple[str, ...]:
    """What changes when a compiler is replaced under its name. (To ask it would take a process at every start.)"""
    found = Path(compiler).resolve()
    status = found.stat()
    return str(found), str(status.st_size), str(status.st_mtime_ns)


def _hash(texts: Sequence[str]) -> str:
    return hashlib.sha256(chr(0).join(texts).encode()).hexdigest()[:16]


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
