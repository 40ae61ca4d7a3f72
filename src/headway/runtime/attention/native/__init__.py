"""Compiled kernels, from the wheel or built once for the processor at hand, and never required.

A decode step by general kernels spends most of its time around the reading of weights, keys and values, of which these
read each once; for prefill, attention runs at nearly the speed of a matrix product, and a product of 8 to 64 rows at
nearly that of many. Those for bf16 want AVX-512 BF16. For fp32 there is attention, in vectors of AVX2 or AVX-512;
linear layers are oneDNN's, which reaches the processor's limit. Without a C++ compiler, or such a processor,
`kernels()` and `fp32_attention()` are None and everything runs on ATen and oneDNN.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

from headway.core.native_build import LIBRARIES, Done, compiled

_P, _I, _F, _N = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "headway_linear": (_P, _P, _F, _N, _P, _P, _P, _P, _I, _I, _I),
    "headway_rotate": (_P, _P, _P, _I, _I, _I, _I, _I),
    "headway_decode": (_P, _P, _P, _P, _I, _I, _P, _P, _I, _P, _P, _I, _P, _P, _I, _I, _I, _F, _P, _P),
}
_CHUNKS = (_P, _I, _I, _P, _P, _I, _I, _P, _I, _I, _N, _P, _I, _I, _P, _I, _P, _I, _I, _I, _F)
_SIGNATURES["headway_prefill"] = _CHUNKS

TILE = 512
"""Most tokens in one tile of `headway_decode`."""

DIMS = (32, 64, 96, 128)
"""Head dimensions of the bf16 attention kernels."""

FP32_DIMS = range(8, 257, 8)
"""Head dimensions of the fp32 attention kernel."""


class CompiledKernels:
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
def kernels() -> CompiledKernels | None:
    """Return the kernels, or None where they cannot be built or run. The first call ever compiles for some seconds.

    HEADWAY_NATIVE=0 in the environment turns them off (`core.native_build`).
    """
    library = build_library()
    if library is None:
        return None
    # A compiler that does not know AVX-512 BF16 builds a library without the kernels, on a processor that has it.
    return CompiledKernels(library) if library.headway_supported() else None


@functools.cache
def fp32_attention() -> Any:
    """Return `headway_attend_fp32`, which takes decodes and chunks alike; None where it cannot be built or run."""
    library = build_fp32_library()
    if library is None:
        return None
    function = library.headway_attend_fp32
    function.argtypes, function.restype = _CHUNKS, None
    return function


def build_fp32_library(done: Done | None = None) -> ctypes.CDLL | None:
    """Return the library of `fp32_attention`; see `build_library`."""
    sets = {"AVX2": "avx2", "AVX512": "avx512"}
    name = sets.get(torch.backends.cpu.get_cpu_capability())
    return None if name is None else compiled(LIBRARIES[f"fp32-{name}"], done)


def build_library(done: Done | None = None) -> ctypes.CDLL | None:
    """Return the library of `kernels`, compiled where neither the wheel nor the cache has it.

    None where it cannot be built or run.

    done: called with the steps done, and all, while it is compiled.
    """
    if not torch.cpu._is_avx512_bf16_supported():
        return None
    return compiled(LIBRARIES["kernels"], done)
