"""The primitive and the merge against double precision: any split of the keys gives the answer of no split."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.kernels import exact
from torch import Tensor

from headway.runtime.attention import backend
from headway.runtime.attention.backend import attend, merge


def tensors(seed: int, kv_heads: int, group: int, rows: int, keys: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((kv_heads * group, rows, dim), (kv_heads, keys, dim), (kv_heads, keys, dim))
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    return q, k, v


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    kv_heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 2, 4, 7]),
    rows=st.integers(1, 9),
    shards=st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(any),
    dim=st.sampled_from([16, 64, 80]),
    seed=st.integers(0, 1000),
)
def test_any_split_with_empty_shards_merges_to_the_whole(
    kv_heads: int, group: int, rows: int, shards: list[int], dim: int, seed: int
) -> None:
    q, k, v = tensors(seed, kv_heads, group, rows, sum(shards), dim)
    parts = [attend(q, *pair, False) for pair in zip(k.split(shards, 1), v.split(shards, 1), strict=True)]
    out, lse = merge([part[0] for part in parts], [part[1] for part in parts])
    wanted, wanted_lse = exact(q, k, v, False)
    assert torch.allclose(out.double(), wanted, atol=2e-6)
    assert torch.allclose(lse.double(), wanted_lse, atol=1e-5)


@pytest.mark.parametrize("path", ["_attend_flash", "_attend_math"])
@pytest.mark.parametrize("causal", [False, True])
def test_both_paths_equal_double_precision(path: str, causal: bool) -> None:
    q, k, v = tensors(1, 2, 4, 33, 33, 64)
    out, lse = getattr(backend, path)(q, k, v, causal, None)
    wanted, wanted_lse = exact(q, k, v, causal)
    assert torch.allclose(out.double(), wanted, atol=2e-6)
    assert torch.allclose(lse.double(), wanted_lse, atol=1e-5)


def test_history_plus_causal_chunk_is_causal_attention_with_an_offset() -> None:
    q, k, v = tensors(2, 2, 2, 50, 50, 32)
    wanted, _ = exact(q, k, v, True)
    past, chunk = q[:, 20:], slice(20, 50)
    old, new = attend(past, k[:, :20], v[:, :20], False), attend(past, k[:, chunk], v[:, chunk], True)
    out, _ = merge([old[0], new[0]], [old[1], new[1]])
    assert torch.allclose(out.double(), wanted[:, 20:], atol=2e-6)


def test_bf16_stays_within_its_own_rounding() -> None:
    q, k, v = (x.bfloat16() for x in tensors(3, 2, 4, 5, 700, 64))
    shards = [1, 300, 0, 399]
    parts = [attend(q, *pair, False) for pair in zip(k.split(shards, 1), v.split(shards, 1), strict=True)]
    out, lse = merge([part[0] for part in parts], [part[1] for part in parts])
    wanted, wanted_lse = exact(q, k, v, False)
    assert out.dtype == torch.float32
    assert lse.dtype == torch.float32
    assert (out.double() - wanted).abs().max() < 2**-8 * wanted.abs().max()
    assert (lse.double() - wanted_lse).abs().max() < 1e-2


def test_an_empty_shard_is_zeros_without_weight() -> None:
    q, k, v = tensors(4, 2, 2, 3, 0, 16)
    out, lse = attend(q, k, v, False)
    assert not out.any()
    assert torch.all(lse == -math.inf)
    merged, merged_lse = merge([out, out], [lse, lse])
    assert not merged.any()
    assert torch.all(merged_lse == -math.inf)


def test_rows_without_keys_do_not_become_nan_beside_rows_with_keys() -> None:
    out = torch.ones(1, 2, 4)
    lse = torch.tensor([[0.5, -math.inf]])
    merged, merged_lse = merge([out, torch.zeros_like(out)], [lse, torch.full_like(lse, -math.inf)])
    assert torch.equal(merged[0, 0], torch.ones(4))
    assert not merged[0, 1].any()
    assert torch.equal(merged_lse, lse)


def test_a_causal_call_must_be_square() -> None:
    q, k, v = tensors(5, 1, 1, 2, 3, 16)
    with pytest.raises(ValueError, match="2 rows and 3 keys"):
        attend(q, k, v, True)
