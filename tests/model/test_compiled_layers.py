"""The compiled few-row path agrees with the general one, and both with fp32, at every number of rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from headway.attention.base import Segment
from headway.attention.cpu import CpuBackend
from headway.attention.native import kernels
from headway.model.config import DecoderConfig
from headway.model.decoder import Decoder
from headway.model.few_rows import MOST_ROWS
from headway.model.random_weights import random_decoder, reference_config

pytestmark = pytest.mark.skipif(
    kernels() is None, reason="no C++ compiler or no AVX-512 BF16 here: there are no kernels to test"
)
CONFIG = replace(reference_config(512), hidden_size=64, layers=2, q_heads=3, kv_heads=1, head_dim=32, mlp_size=96,
                 vocab_size=50, rope=replace(reference_config(512).rope, rotary_dim=32))  # fmt: skip


def pair(config: DecoderConfig) -> tuple[Decoder, Decoder]:
    few = random_decoder(config, torch.bfloat16)
    general = Decoder(config, few.weights, CpuBackend(False))
    general._few = None
    assert few._few is not None
    return few, general


def logits(decoder: Decoder, rows: int) -> torch.Tensor:
    """A first chunk of 40, then `rows` more tokens as one decode each of as many requests that share a start."""
    generator = torch.Generator().manual_seed(rows)
    tokens = torch.randint(0, 50, (40,), generator=generator)
    pool = decoder.make_pool(64 * rows)
    for row in range(rows):
        plan = decoder.backend.plan([Segment(0, 40, 0, ((64 * row, 64),))], pool)
        decoder.forward(tokens, torch.arange(40), plan, torch.tensor([39]))
    plan = decoder.backend.plan([Segment(row, 1, 40, ((64 * row, 64),)) for row in range(rows)], pool)
    return decoder.forward(torch.arange(rows), torch.full((rows,), 40), plan, None)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, 8, 9, 16, 23, MOST_ROWS])
@pytest.mark.parametrize("biased", [False, True])
def test_any_number_of_rows(rows: int, biased: bool) -> None:
    few, general = pair(replace(CONFIG, qkv_bias=biased, out_bias=biased, mlp_bias=biased))
    got, wanted = logits(few, rows), logits(general, rows)
    assert got.shape == (rows, 50)
    assert (got - wanted).abs().max() <= 0.03 * wanted.abs().max()


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    few, _ = pair(CONFIG)
    one, many = logits(few, 1), logits(few, 1)
    assert torch.equal(one, many)


def test_head_norms_and_odd_rotations_take_the_general_path() -> None:
    assert random_decoder(replace(CONFIG, qk_norm=True), torch.bfloat16)._few is None
    assert random_decoder(replace(CONFIG, rope=replace(CONFIG.rope, rotary_dim=16)), torch.bfloat16)._few is None
    assert random_decoder(CONFIG, torch.float32)._few is None
