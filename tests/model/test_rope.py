"""Angles are exact in float64 at any position; rules whose frequencies depend on a length are fixed by the one served.

That every rule gives transformers' frequencies is in `tests.parity`.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from headway.core.errors import CheckpointError
from headway.runtime.model.config import RopeConfig, read_rope
from headway.runtime.model.decoder import RotaryEmbedding, rotate_


def test_dynamic_is_fixed_by_the_longest_length_served() -> None:
    config = RopeConfig("dynamic", 1e4, 64, 4096, factor=2.0)
    short, same, longer = (RotaryEmbedding(config, length).frequencies for length in (100, 4096, 16384))
    assert torch.equal(short, same)
    assert bool((longer[1:] < same[1:]).all())


def test_angles_at_ten_million_tokens_are_exact() -> None:
    theta, dims = 5e5, 64
    positions = [0, 1, 999_983, 1 << 20, 9_999_991, 10_000_000]
    table = RotaryEmbedding(RopeConfig("default", theta, dims, 1 << 24), 1 << 24).table(
        torch.tensor(positions), torch.float32
    )
    for row, position in enumerate(positions):
        for pair in range(dims // 2):
            angle = math.fmod(position * theta ** (-2 * pair / dims), 2 * math.pi)
            assert abs(float(table.cos[row, 0, pair]) - math.cos(angle)) < 1e-6
            assert abs(float(table.sin[row, 0, dims // 2 + pair]) - math.sin(angle)) < 1e-6
    heads = torch.randn(len(positions), 3, dims, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(rotate_(heads.clone(), table).norm(dim=-1), heads.norm(dim=-1), rtol=1e-5)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "spiral", "factor": 2.0}, "rope type 'spiral' is not supported; supported are default"),
        ({"rope_type": "llama3", "factor": 8.0}, "'low_freq_factor' is missing"),
        ({"rope_type": "longrope", "short_factor": [1.0]}, "'original_max_position_embeddings' is missing"),
        (
            {"rope_type": "longrope", "original_max_position_embeddings": 4096, "short_factor": [1.0]},
            "has 1 numbers where 32",
        ),
        ({"full_attention": {"rope_type": "default"}}, "differ by layer"),
    ],
)
def test_bad_rope_parameters_are_named(rope: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_rope({"rope_parameters": rope}, 64, 4096, "config.json")


def test_two_objects_that_disagree_are_refused() -> None:
    given = {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "linear", "factor": 2.0}}
    with pytest.raises(CheckpointError, match="say different things: keep the one"):
        read_rope(given, 64, 4096, "config.json")
