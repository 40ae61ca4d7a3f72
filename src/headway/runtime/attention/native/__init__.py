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
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headway.core.errors import ConfigError
from headway.core.native_build import LIBRARIES, Done, compiled
from headway.runtime.attention.kv_pool import KvPool

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


# Calls of the attention kernels: all decodes of a layer, or chunks of many rows.

Runs = Sequence[tuple[int, int]]


class NativeDecodes:
    """Arguments of `headway_decode` for one iteration's decodes. Holds the pointers' owners alive.

    rows: the decodes' rows in the batch. shards: each request's visible slot ranges (first, count), ending with the
    slot of its new token.
    """

    def __init__(self, kernels: CompiledKernels, rows: Sequence[int], shards: Sequence[Runs], pool: KvPool) -> None:
        self._kernels = kernels
        self._pool = pool
        tiles: list[int] = []
        edges = [0]
        for slot_ranges in shards:
            for first, count in slot_ranges:
                # A tile never crosses a range, so that its slots are contiguous: the kernel reads it with one pointer.
                for done in range(0, count, TILE):
                    tiles += (first + done, min(TILE, count - done))
            edges.append(len(tiles) // 2)
        # The new token's slot is the last visible one; the kernel writes there before it reads.
        last = [slot_ranges[-1][0] + slot_ranges[-1][1] - 1 for slot_ranges in shards]
        # One int64 table in the order rows, slots, edges (count + 1), tiles (first, tokens); addresses below are byte
        # offsets.
        self._table = np.array([*rows, *last, *edges, *tiles], dtype=np.int64)
        self._count = count_of = len(shards)
        base = self._table.ctypes.data
        self._rows, self._slots = base, base + 8 * count_of
        self._edges, self._tiles = base + 16 * count_of, base + 8 * (3 * count_of + 1)
        self._base, self._stride = pool.data.data_ptr(), pool.slots * pool.head_dim
        self._tile_count = edges[-1]
        self._scratch: Tensor | None = None
        self._scratch_at = 0

    def run(
        self, layer: int, q: Tensor, out: Tensor, new: tuple[Tensor, Tensor] | None, lse: Tensor | None = None
    ) -> None:
        """Write the decodes' rows of out (T, q_heads, dim). Others stay untouched.

        new: the batch's keys and values, of which the decodes' are stored first; None: they are in the pool already.
        With lse (T, q_heads) in fp32, answers are partial and out is fp32.
        """
        _, q_heads, dim = q.shape
        kv_heads = self._pool.kv_heads
        self._prepare(q_heads, kv_heads, dim)
        plane = 2 * kv_heads * self._stride
        keys = self._base + 2 * plane * layer
        k, v, step = (0, 0, 0) if new is None else (new[0].data_ptr(), new[1].data_ptr(), new[0].stride(0))
        self._kernels.decode(
            q.data_ptr(), k, v, out.data_ptr(), q.stride(0), step, keys, keys + plane,
            self._stride, self._rows, self._slots, self._count, self._tiles, self._edges, q_heads, kv_heads, dim,
            dim**-0.5, self._scratch_at, 0 if lse is None else lse.data_ptr(),
        )  # fmt: skip

    def _prepare(self, q_heads: int, kv_heads: int, dim: int) -> None:
        """Allocate the kernel's scratch memory at the first layer of an iteration."""
        if self._scratch is None:
            # A tile's partial answer covers up to 4 query heads: 4 * dim sums, 4 maxima and 4 totals, in fp32.
            quads = (q_heads // kv_heads + 3) // 4
            self._scratch = torch.empty(self._tile_count * quads * kv_heads * (4 * dim + 8), dtype=torch.float32)
            self._scratch_at = self._scratch.data_ptr()


class NativeChunks:
    """Arguments of a chunk kernel (`chunk_kernel`) for one iteration's chunks.

    spans: each chunk's first row in the batch and its number of rows. shards: each chunk's visible slot ranges.
    causal: for each chunk, whether its own tokens are the last of its slots and masked causally; otherwise its rows see
    every slot. Default: all are causal.
    """

    def __init__(
        self,
        kernel: Any,
        spans: Sequence[tuple[int, int]],
        shards: Sequence[Runs],
        pool: KvPool,
        causal: Sequence[bool] | None = None,
    ) -> None:
        self._kernel = kernel
        self._pool = pool
        self._count = len(spans)
        masked = [True] * len(spans) if causal is None else causal
        self._table = chunk_table(
            [(*span, mask, slot_ranges) for span, mask, slot_ranges in zip(spans, masked, shards, strict=True)]
        )
        self._chunks = self._table.ctypes.data
        # Six int64 a chunk precede the slot ranges: 6 * 8 = 48 bytes.
        self._runs = self._chunks + 48 * self._count
        self._base, self._stride = pool.data.data_ptr(), pool.slots * pool.head_dim

    def run(self, layer: int, q: Tensor, out: Tensor, lse: Tensor | None = None) -> None:
        """Write the chunks' rows of out (T, q_heads, dim). Their keys and values are in the pool already.

        With lse (T, q_heads) in fp32, answers are partial and out is fp32.
        """
        heads, dim = self._pool.kv_heads, self._pool.head_dim
        plane = self._pool.dtype.itemsize * heads * self._stride
        keys = self._base + 2 * plane * layer
        self._kernel(
            q.data_ptr(), q.stride(0), q.stride(1), keys, keys + plane, dim, self._stride,
            out.data_ptr(), out.stride(0), out.stride(1), int(out.dtype == torch.float32),
            0 if lse is None else lse.data_ptr(), 0 if lse is None else lse.stride(0), 1,
            self._chunks, self._count, self._runs, q.shape[1], heads, dim, dim**-0.5,
        )  # fmt: skip


def attend_native(
    kernel: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """`primitive.attend` by a chunk kernel, for non-empty inputs that `shard_kernel` gave it for. dtype: the inputs' or
    fp32."""
    q_heads, rows, dim = q.shape
    kv_heads, keys, _ = k.shape
    # The kernel takes one pair of strides for both.
    if k.stride() != v.stride():
        k, v = k.contiguous(), v.contiguous()
    out = torch.empty((q_heads, rows, dim), dtype=dtype)
    lse = torch.empty((q_heads, rows), dtype=torch.float32)
    table = chunk_table([(0, rows, causal, [(0, keys)])])
    chunks = table.ctypes.data
    kernel(
        q.data_ptr(), q.stride(1), q.stride(0), k.data_ptr(), v.data_ptr(), k.stride(1), k.stride(0),
        out.data_ptr(), dim, rows * dim, int(dtype == torch.float32), lse.data_ptr(), 1, rows,
        chunks, 1, chunks + 48, q_heads, kv_heads, dim, scale,
    )  # fmt: skip
    return out, lse


def chunk_table(chunks: Sequence[tuple[int, int, bool, Runs]]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the table that `headway_prefill` reads, from (first row, rows, causal, visible slots) of each chunk.

    Six numbers for each chunk (first row, rows, visible tokens, causal, its first range, its ranges), then all ranges.
    """
    head: list[int] = []
    flat: list[int] = []
    for row, rows, causal, slot_ranges in chunks:
        head += (row, rows, sum(count for _, count in slot_ranges), causal, len(flat) // 2, len(slot_ranges))
        for run in slot_ranges:
            flat += run
    return np.array([*head, *flat], dtype=np.int64)


def chunk_kernel(dtype: torch.dtype, device: torch.device, dim: int) -> Any:
    """Return the compiled kernel that attends chunks of this type and head dimension, or None.

    For bf16 with heads of 32, 64, 96 or 128 `headway_prefill` where the processor has it; else `headway_attend_*`, for
    heads of a multiple of 8 up to 256.
    """
    if device.type != "cpu":
        return None
    native = kernels() if dtype == torch.bfloat16 and dim in DIMS else None
    found = native or (general_kernels(dtype) if dim in GENERAL_DIMS else None)
    return None if found is None else found.prefill


def pool_kernel(pool: KvPool) -> Any:
    """Return the `chunk_kernel` of a pool, or None."""
    return chunk_kernel(pool.dtype, pool.data.device, pool.head_dim)


def shard_kernel(q: Tensor, k: Tensor, v: Tensor) -> Any:
    """Return the `chunk_kernel` of these, each with contiguous heads, or None."""
    alike = q.dtype == k.dtype == v.dtype and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    return chunk_kernel(q.dtype, q.device, q.shape[-1]) if alike else None
