"""The compiled path agrees with fp32 at every number of rows, and a row does not depend on its neighbours."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.helpers.kernels import WAYS, use_kernels
from tests.helpers.random_weights import random_decoder, reference_config

from headway.runtime.attention.backend import BatchSegment
from headway.runtime.attention.backends import CpuBackend
from headway.runtime.attention.native import kernels
from headway.runtime.model.decoder import DecoderModel, DecoderWeights, LayerWeights, PackedLinear

pytestmark = pytest.mark.skipif(
    kernels() is None, reason="no C++ compiler or no AVX-512 BF16 here: there are no kernels to test"
)


@pytest.fixture(params=WAYS, scope="module", autouse=True)
def way(request: pytest.FixtureRequest) -> Iterator[None]:
    yield from use_kernels(request.param)


CONFIG = replace(reference_config(512), hidden_size=64, layers=2, q_heads=3, kv_heads=1, head_dim=32, mlp_size=96,
                 vocab_size=50, rope=replace(reference_config(512).rope, rotary_dim=32))  # fmt: skip


def exact(decoder: DecoderModel) -> DecoderModel:
    """The same weights in fp32, by the general path."""

    def wide(held: Any) -> Any:
        if isinstance(held, PackedLinear):
            return PackedLinear(held.dense().float(), None if held.bias is None else held.bias.float())
        return None if held is None else held.float()

    def layer(held: LayerWeights) -> LayerWeights:
        return LayerWeights(*(wide(getattr(held, name)) for name in LayerWeights.__slots__))

    weights = decoder.weights
    layers = [layer(held) for held in weights.layers]
    return DecoderModel(
        decoder.config,
        DecoderWeights(layers, wide(weights.embedding), wide(weights.final_norm), wide(weights.head)),
        CpuBackend(False),
    )


def logits(decoder: DecoderModel, rows: int, first: int = 40) -> torch.Tensor:
    """A first chunk, then `rows` more tokens as one decode each of as many requests that share a start."""
    generator = torch.Generator().manual_seed(rows)
    tokens = torch.randint(0, 50, (first,), generator=generator)
    pool = decoder.make_pool(512 * rows)
    for row in range(rows):
        plan = decoder.backend.plan([BatchSegment(0, first, 0, ((512 * row, 512),))], pool)
        decoder.forward(tokens, torch.arange(first), plan, torch.tensor([first - 1]))
    plan = decoder.backend.plan([BatchSegment(row, 1, first, ((512 * row, 512),)) for row in range(rows)], pool)
    return decoder.forward(torch.arange(rows), torch.full((rows,), first), plan, None)


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 6, 7, 8, 9, 13, 23, 32])
@pytest.mark.parametrize("biased", [False, True])
def test_any_number_of_decodes(rows: int, biased: bool) -> None:
    decoder = random_decoder(replace(CONFIG, qkv_bias=biased, out_bias=biased, mlp_bias=biased), torch.bfloat16)
    got, wanted = logits(decoder, rows), logits(exact(decoder), rows)
    assert got.shape == (rows, 50)
    assert (got - wanted).abs().max() <= 0.03 * wanted.abs().max()


@pytest.mark.parametrize("first", [1, 17, 239, 240, 241, 255, 256, 257, 500])
def test_chunks_of_any_size(first: int) -> None:
    decoder = random_decoder(CONFIG, torch.bfloat16)
    got, wanted = logits(decoder, 2, first), logits(exact(decoder), 2, first)
    assert (got - wanted).abs().max() <= 0.03 * wanted.abs().max()


@pytest.mark.parametrize("shape", [(16, 32), (1, 64), (50, 96), (133, 512), (768, 128)])
def test_a_row_of_a_linear_layer_is_the_same_alone_and_among_any_others(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(*shape, generator=generator).bfloat16(), torch.randn(shape[0]).bfloat16()
    linear = PackedLinear(weight.clone(), bias)
    assert linear.panels is not None
    assert torch.equal(linear.dense(), weight)
    x = torch.randn(500, shape[1], generator=generator).bfloat16()
    alone = torch.cat([linear(row.unsqueeze(0)) for row in x])
    wanted = (x.double() @ weight.double().T + bias.double()).float()
    assert (alone - wanted).abs().max() <= 0.006 * wanted.abs().max()
    for rows in (2, 6, 7, 12, 13, 100, 240, 241, 500):
        assert torch.equal(linear(x[:rows]), alone[:rows])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_any_number_of_threads_divides_all_rows(threads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    linear = PackedLinear(torch.randn(40, 64, generator=generator).bfloat16())
    x = torch.randn(800, 64, generator=generator).bfloat16()
    alone = torch.cat([linear(row.unsqueeze(0)) for row in x])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for rows in (127, 128, 129, 255, 256, 257, 289, 384, 385, 513, 769, 800):
            assert torch.equal(linear(x[:rows]), alone[:rows]), rows
    finally:
        torch.set_num_threads(before)


def test_head_norms_and_odd_rotations_take_the_general_path() -> None:
    assert random_decoder(replace(CONFIG, qk_norm=True), torch.bfloat16)._compiled is None
    assert random_decoder(replace(CONFIG, rope=replace(CONFIG.rope, rotary_dim=16)), torch.bfloat16)._compiled is None
