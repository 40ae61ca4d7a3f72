"""Compiled kernels, from the wheel or built once for the processor at hand, and never required.

A decode step by general kernels spends most of its time around the reading of weights, keys and values, of which these
read each once; for prefill, attention runs at nearly the speed of a matrix product, and a product of 8 to 64 rows at
nearly that of many. There are two libraries. `kernels()`, for bf16, multiplies pairs of bf16 and wants AVX-512 BF16; it
does so by tiles where there is AMX.
`general_kernels(dtype)`, for fp32, and for bf16 wherever the first does not apply, computes in fp32 by vectors of AVX2
or AVX-512: bf16 is widened as it is read, so that its memory is half and its speed that of fp32. Without a C++
compiler, or such a processor, both are None and everything runs on ATen and oneDNN.

HEADWAY_ISA in the environment (avx2, avx512, avx512_bf16, amx) is the newest instruction set that may be used: to test
what other processors run.
"""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Any

import torch

from headway.core.errors import ConfigError
from headway.core.native_build import LIBRARIES, Done, compiled

_P, _I, _F, _N = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
_LINEAR: tuple[Any, ...] = (_P, _P, _F, _N, _P, _P, _P, _P, _I, _I, _I)
_ROTATE: tuple[Any, ...] = (_P, _P, _P, _I, _I, _I, _I, _I)
_DECODE: tuple[Any, ...] = (_P, _P, _P, _P, _I, _I, _P, _P, _I, _P, _P, _I, _P, _P, _I, _I, _I, _F, _P, _P)
_CHUNKS: tuple[Any, ...] = (_P, _I, _I, _P, _P, _I, _I, _P, _I, _I, _N, _P, _I, _I, _P, _I, _P, _I, _I, _I, _F)

ISAS = ("avx2", "avx512", "avx512_bf16", "amx")
"""Instruction sets that kernels are compiled for, each with all before it."""

TILE = 512
"""Most tokens in one tile of `headway_decode`."""

DIMS = (32, 64, 96, 128)
"""Head dimensions of the bf16 attention kernels."""

GENERAL_DIMS = range(8, 257, 8)
"""Head dimensions of the general attention kernels."""


class GeneralKernels:
    """The compiled functions for one type of weights and rows; the .cpp files say what each argument is."""

    pairs = 1
    """Inputs that lie side by side in a panel of weights."""
    together = 240
    """Rows that one pass over weights serves: `kTogether` of the .cpp file."""

    def __init__(self, linear: Any, rotate: Any, prefill: Any) -> None:
        for function, arguments in ((linear, _LINEAR), (rotate, _ROTATE), (prefill, _CHUNKS)):
            function.argtypes, function.restype = arguments, None
        self.linear, self.rotate, self.prefill = linear, rotate, prefill


class CompiledKernels(GeneralKernels):
    """Those for bf16, with a kernel of decodes. tiles: products by AMX, if compiled; for a process that may use it."""

    pairs = 2

    def __init__(self, library: ctypes.CDLL, tiles: bool) -> None:
        self.tiles = tiles = tiles and bool(library.headway_tiles())
        self.together = 256 if tiles else self.together
        way = "_amx" if tiles else ""
        linear, prefill = (getattr(library, f"headway_{what}{way}") for what in ("linear", "prefill"))
        super().__init__(linear, library.headway_rotate, prefill)
        self.decode: Any = library.headway_decode
        self.decode.argtypes, self.decode.restype = _DECODE, None


@functools.cache
def isa() -> str | None:
    """Return the newest of `ISAS` that this processor has and HEADWAY_ISA allows; None: none of them."""
    vectors = torch.backends.cpu.get_cpu_capability()
    held = 2 if vectors.startswith("AVX512") else 1 if vectors == "AVX2" else 0
    if held == 2 and torch.cpu._is_avx512_bf16_supported():
        # The operating system lends a process tile registers when it asks for them.
        held = 4 if torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx() else 3
    wanted = os.environ.get("HEADWAY_ISA") or ISAS[-1]
    if wanted not in ISAS:
        raise ConfigError(f"HEADWAY_ISA must be one of {', '.join(ISAS)}, not {wanted!r}")
    held = min(held, ISAS.index(wanted) + 1)
    return ISAS[held - 1] if held else None


@functools.cache
def kernels() -> CompiledKernels | None:
    """Return the kernels, or None where they cannot be built or run. The first call ever compiles for some seconds.

    HEADWAY_NATIVE=0 in the environment turns them off (`core.native_build`).
    """
    library = build_library()
    if library is None:
        return None
    # A compiler that does not know AVX-512 BF16 builds a library without the kernels, on a processor that has it.
    return CompiledKernels(library, isa() == "amx") if library.headway_supported() else None


@functools.cache
def general_kernels(dtype: torch.dtype) -> GeneralKernels | None:
    """Return the kernels that compute this type in fp32; None where they cannot be built or run."""
    name = {torch.float32: "fp32", torch.bfloat16: "bf16"}.get(dtype)
    library = build_general_library() if name else None
    if library is None:
        return None
    return GeneralKernels(*(getattr(library, f"headway_{what}_{name}") for what in ("linear", "rotate", "attend")))


def linear_kernels(dtype: torch.dtype) -> GeneralKernels | None:
    """Return the kernels of linear layers, or None where there are none."""
    return (kernels() if dtype == torch.bfloat16 else None) or general_kernels(dtype)


def build_general_library(done: Done | None = None) -> ctypes.CDLL | None:
    """Return the library of `general_kernels`; see `build_library`."""
    name = "avx2" if isa() == "avx2" else "avx512" if isa() else None
    # Code for this very processor would have all its instruction sets.
    return None if name is None else compiled(LIBRARIES[f"fp32-{name}"], done, native="HEADWAY_ISA" not in os.environ)


def build_library(done: Done | None = None) -> ctypes.CDLL | None:
    """Return the library of `kernels`, compiled where neither the wheel nor the cache has it.

    None where it cannot be built or run.

    done: called with the steps done, and all, while it is compiled.
    """
    return compiled(LIBRARIES["kernels"], done) if isa() in ISAS[2:] else None
