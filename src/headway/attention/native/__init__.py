"""Compiled kernels for bf16, built once for the processor at hand, and never required.

For few rows they read each weight and each live key and value once, where a decode step by general kernels spends most
of its time around the reading; for prefill, attention runs at nearly the speed of a matrix product. Without a C++
compiler, or a processor with AVX-512 BF16, `kernels()` is None and everything runs on ATen and oneDNN.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

_FOLDER = Path(__file__).parent
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC")
_P, _I, _F, _N = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "headway_linear": (_P, _P, _F, _N, _P, _P, _P, _P, _I, _I, _I),
    "headway_rotate": (_P, _P, _P, _I, _I, _I, _I, _I),
    "headway_decode": (_P, _P, _P, _P, _I, _I, _P, _P, _I, _P, _P, _I, _P, _P, _I, _I, _I, _F, _P),
    "headway_prefill": (_P, _I, _I, _P, _P, _I, _I, _P, _I, _I, _N, _P, _I, _I, _P, _I, _P, _I, _I, _I, _F),
}
_log = logging.getLogger("headway.native")

TILE = 512
"""Most tokens in one tile of `headway_decode`."""

DIMS = (32, 64, 96, 128)
"""Head dimensions of the attention kernels."""


class Kernels:
    """The compiled functions; the .cpp files say what each argument is."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, None
        self.linear: Any = library.headway_linear
        self.rotate: Any = library.headway_rotate
        self.decode: Any = library.headway_decode
        self.prefill: Any = library.headway_prefill


@functools.cache
def kernels() -> Kernels | None:
    """The kernels, or None where they cannot be built or run. The first call ever compiles for some seconds.

    HEADWAY_NATIVE=0 in the environment turns them off. The library is kept in the user's cache folder under a name made
    of source, compiler, flags and processor; several processes may build it at once.
    """
    if os.environ.get("HEADWAY_NATIVE", "1") == "0" or not torch.cpu._is_avx512_bf16_supported():
        return None
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")
    if compiler is None:
        _log.info("no C++ compiler: compiled kernels are off")
        return None
    try:
        library = ctypes.CDLL(str(_build(compiler)))
    except (OSError, subprocess.SubprocessError) as error:
        _log.warning("compiled kernels are off: %s", getattr(error, "stderr", None) or error)
        return None
    return Kernels(library) if library.headway_supported() else None


def _build(compiler: str) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headway"
    sources = sorted(_FOLDER.glob("*.cpp"))
    texts = [path.read_text() for path in (*sources, *sorted(_FOLDER.glob("*.h")))]
    identity = [*texts, compiler, *_FLAGS, platform.machine(), _processor()]
    target = cache / f"kernels-{hashlib.sha256(chr(0).join(identity).encode()).hexdigest()[:16]}.so"
    if target.is_file():
        return target
    cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=cache) as folder, ThreadPoolExecutor(len(sources)) as side_by_side:
        objects = [str(Path(folder) / f"{path.stem}.o") for path in sources]
        linked = Path(folder) / "kernels.so"
        steps = [
            (compiler, *_FLAGS, "-fopenmp", "-c", str(path), "-o", made)
            for path, made in zip(sources, objects, strict=True)
        ]
        list(side_by_side.map(_compile, steps))
        _compile((compiler, "-shared", *objects, "-o", str(linked)))
        os.replace(linked, target)
    return target


def _compile(step: tuple[str, ...]) -> None:
    subprocess.run(step, check=True, capture_output=True, text=True, timeout=120)


def _processor() -> str:
    """What -march=native depends on: the instruction sets of the first processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith("flags")), platform.processor())
