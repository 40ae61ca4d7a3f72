"""Linear layers in fp32 arithmetic, of fp32 and bf16, against double precision, in vectors of every width.

Bound, for a sum of k products in any order: (k + 2) 2^-24 of the sum of their magnitudes, and the rounding to bf16.
"""

from __future__ import annotations

import ctypes
import platform
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.present import present
from tests.helpers.random_weights import random_decoder, reference_config
from torch import Tensor

from headway.core.native_build import LIBRARIES, build, find_compiler
from headway.runtime.attention.backend import BatchSegment
from headway.runtime.attention.backends import CpuBackend
from headway.runtime.attention.native import GeneralKernels, general_kernels
from headway.runtime.model import decoder as linear_module
from headway.runtime.model.decoder import DecoderModel

pytestmark = pytest.mark.skipif(
    general_kernels(torch.float32) is None, reason="no C++ compiler or no AVX2 here: nothing to test"
)
COMPILER = find_compiler() if platform.machine() == "x86_64" else None
TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ctypes.CDLL]:
    """The library by instruction set, narrower than what this processor has."""
    folder: Path = tmp_path_factory.mktemp("kernels")
    libraries = {}
    for name, flag in (("AVX2", "-march=x86-64-v3"), ("SSE", "-march=x86-64")):
        assert COMPILER is not None
        build(COMPILER, LIBRARIES["fp32-avx2"], folder / f"{name}.so", (flag,))
        libraries[name] = ctypes.CDLL(str(folder / f"{name}.so"))
    return libraries


def bind(library: ctypes.CDLL, dtype: torch.dtype) -> GeneralKernels:
    return GeneralKernels(
        *(getattr(library, f"headway_{what}_{TYPES[dtype]}") for what in ("linear", "rotate", "attend"))
    )


def product(
    kernels: GeneralKernels,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    norm: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    panels = linear_module._panels(weight, kernels.pairs)
    out = x.new_empty(x.shape[0], weight.shape[0])

    def at(tensor: Tensor | None) -> int:
        return 0 if tensor is None else tensor.data_ptr()

    kernels.linear(
        x.data_ptr(), at(norm), 1e-6, int(gated), panels.data_ptr(), at(bias), at(residual), out.data_ptr(),
        x.shape[0], *weight.shape,
    )  # fmt: skip
    return out


def check(
    kernels: GeneralKernels, dtype: torch.dtype, rows: int, n: int, k: int, what: str, extras: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    gated = what == "gated"
    x, weight = random(rows, 2 * k if gated else k), random(n, k)
    bias, residual = (random(n), random(rows, n)) if extras else (None, None)
    norm = random(k) if what == "norm" else None
    got = product(kernels, x, weight, bias, residual, norm, gated).double()
    inputs = x.double()
    if gated:
        inputs = torch.nn.functional.silu(inputs[:, :k]) * inputs[:, k:]
    if norm is not None:
        inputs = inputs * (inputs.square().mean(1, keepdim=True) + 1e-6).rsqrt() * norm.double()
    wanted, size = inputs @ weight.double().T, inputs.abs() @ weight.double().abs().T
    for one in (bias, residual):
        if one is not None:
            wanted, size = wanted + one.double(), size + one.double().abs()
    # The prologue's own roundings: a norm of k squares, or an exponential.
    bound = (2 * k + 16) * 2.0**-24 * size + (2.0**-8 * wanted.abs() if dtype == torch.bfloat16 else 0.0)
    assert bool(((got - wanted).abs() <= bound).all())


SHAPES = {
    "dtype": st.sampled_from(list(TYPES)),
    "rows": st.one_of(st.integers(1, 30), st.sampled_from([239, 240, 241, 500])),
    "n": st.sampled_from([1, 16, 50, 133, 768]),
    "k": st.sampled_from([32, 96, 512]),
    "what": st.sampled_from(["plain", "norm", "gated"]),
    "extras": st.booleans(),
    "seed": st.integers(0, 99),
}


@settings(max_examples=80, deadline=None, derandomize=True)
@given(**SHAPES)
def test_any_shape_is_within_the_error_of_its_sum(dtype: torch.dtype, **shape: Any) -> None:
    kernels = present(general_kernels(dtype))
    check(kernels, dtype, **shape)


@pytest.mark.long
@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler on x86-64")
@pytest.mark.parametrize("name", ["AVX2", "SSE"])
def test_narrower_vectors_are_as_exact(name: str, narrow: dict[str, ctypes.CDLL]) -> None:
    @settings(max_examples=40, deadline=None, derandomize=True)
    @given(**SHAPES)
    def every(dtype: torch.dtype, **shape: Any) -> None:
        check(bind(narrow[name], dtype), dtype, **shape)

    every()


@pytest.mark.parametrize("dtype", list(TYPES))
def test_a_row_is_the_same_alone_and_among_any_others_and_by_any_threads(dtype: torch.dtype) -> None:
    kernels = present(general_kernels(dtype))
    x, weight = torch.randn(300, 96).to(dtype), torch.randn(200, 96).to(dtype)
    alone = torch.cat([product(kernels, row.unsqueeze(0), weight) for row in x])
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for rows in (2, 3, 6, 7, 12, 13, 240, 241, 300):
                assert torch.equal(product(kernels, x[:rows], weight), alone[:rows])
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("dtype", list(TYPES))
def test_rounding_is_to_the_nearest_and_keeps_what_is_no_number(dtype: torch.dtype) -> None:
    kernels = present(general_kernels(dtype))
    x = torch.zeros(3, 32).to(dtype)
    x[0, 0], x[1, 0], x[2, 0] = float("nan"), float("inf"), 3.1415926
    weight = torch.zeros(17, 32).to(dtype)
    weight[:, 0] = 1.0
    got = product(kernels, x, weight)
    assert got[0].isnan().all()
    assert got[1].isinf().all()
    assert torch.equal(got[2], x[2, :1].expand(17))


@pytest.mark.parametrize("first", [1, 17, 241])
@pytest.mark.parametrize("dtype", list(TYPES))
def test_a_decoder_by_these_kernels_agrees_with_the_general_path(
    first: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = reference_config(512)
    config = replace(config, hidden_size=64, layers=2, q_heads=3, kv_heads=1, head_dim=32, mlp_size=96, vocab_size=50,
                     rope=replace(config.rope, rotary_dim=32))  # fmt: skip

    def made(kernels: GeneralKernels | None, backend: CpuBackend) -> DecoderModel:
        for name in ("headway.runtime.model.decoder", "headway.runtime.model.decoder"):
            monkeypatch.setattr(f"{name}.linear_kernels", lambda _: kernels)
        decoder = random_decoder(config, dtype)
        assert (decoder._compiled is None) == (kernels is None)
        return DecoderModel(config, decoder.weights, backend)

    def logits(decoder: DecoderModel) -> Tensor:
        plan = decoder.backend.plan([BatchSegment(0, first, 0, ((0, first),))], decoder.make_pool(512))
        return decoder.forward(torch.arange(first) % 50, torch.arange(first), plan, None)

    got, wanted = logits(made(general_kernels(dtype), CpuBackend())), logits(made(None, CpuBackend(False)))
    assert (got - wanted).abs().max() <= (2e-5 if dtype == torch.float32 else 0.03) * wanted.abs().max()
