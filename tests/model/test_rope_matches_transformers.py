"""Every scaling rule gives transformers' frequencies, wherever its own length implies the same choice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.checkpoints import make_tiny

from headway.core.errors import CheckpointError, ConfigError
from headway.runtime.attention.base import BatchSegment
from headway.runtime.model.loading import load_decoder
from headway.runtime.model.rope import RotaryEmbedding, rotate_
from headway.runtime.model.rope_config import RopeConfig, read_rope

LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.1, 1.3, 2.0],
        "long_factor": [1.5, 2.5, 5.0, 9.0], "original_max_position_embeddings": 64}  # fmt: skip
RULES: dict[str, tuple[str, dict[str, Any], int | None, int]] = {
    "default": ("llama", {"rope_type": "default", "rope_theta": 5e5}, None, 60),
    "linear": ("llama", {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}, None, 60),
    "dynamic": ("llama", {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, None, 60),
    "llama3": ("llama", {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
                         "high_freq_factor": 4.0, "original_max_position_embeddings": 64}, None, 100),
    "yarn": ("qwen2", {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
                       "original_max_position_embeddings": 128}, None, 150),
    "yarn-mscale": ("llama", {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 1.0, "beta_fast": 16.0,
                              "mscale_all_dim": 0.5, "original_max_position_embeddings": 128}, None, 150),
    "longrope-long": ("phi3", LONG, None, 100),
    "longrope-short": ("phi3", LONG, 64, 60),
}  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
def test_logits_equal_those_of_transformers(rule: str, tmp_path: Path) -> None:
    import transformers

    family, rope, limit, length = RULES[rule]
    own = {"original_max_position_embeddings": 64} if family == "phi3" else {}
    make_tiny(family, tmp_path, rope_parameters=dict(rope), **own)
    decoder = load_decoder(tmp_path, max_model_len=limit)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = torch.randint(3, 128, (length,), generator=torch.Generator().manual_seed(7))
    with torch.inference_mode():
        wanted = reference(tokens[None]).logits[0]
    pool, got = decoder.make_pool(256), []
    for start, stop in ((0, 17), (17, 18), (18, length)):
        plan = decoder.backend.plan([BatchSegment(0, stop - start, start, ((40, 200),))], pool)
        got.append(decoder.forward(tokens[start:stop], torch.arange(start, stop), plan, None))
    assert (torch.cat(got) - wanted).abs().max() <= 1e-4 * wanted.abs().max()


def test_both_spellings_read_the_same() -> None:
    scaling = {"type": "linear", "factor": 2.0}
    old = read_rope({"rope_theta": 5e4, "rope_scaling": scaling}, 64, 4096, "config.json")
    new = read_rope(
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e4}}, 64, 4096, "config.json"
    )
    assert old == new
    assert old.theta == 5e4


def test_dynamic_is_fixed_by_the_longest_length_served() -> None:
    config = RopeConfig("dynamic", 1e4, 64, 4096, factor=2.0)
    short, same, longer = (RotaryEmbedding(config, length).frequencies for length in (100, 4096, 16384))
    assert torch.equal(short, same)
    assert bool((longer[1:] < same[1:]).all())


def test_positions_of_a_million_rotate_as_in_double_precision() -> None:
    rotary = RotaryEmbedding(RopeConfig("default", 5e5, 64, 1 << 20), 1 << 20)
    positions = torch.tensor([0, 1, 999_983, 1 << 20])
    table = rotary.table(positions, torch.float32)
    angles = positions.double()[:, None] * rotary.frequencies.double()
    assert torch.allclose(table.cos[:, 0, :32].double(), torch.cos(angles), atol=0.05)
    heads = torch.randn(4, 3, 64, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(rotate_(heads.clone(), table).norm(dim=-1), heads.norm(dim=-1), rtol=1e-5)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "spiral", "factor": 2.0}, "rope type 'spiral' is not supported; supported are default"),
        ({"rope_type": "linear"}, "'factor' is missing"),
        ({"rope_type": "llama3", "factor": 8.0}, "'low_freq_factor' is missing"),
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}, "has 1 numbers where 32"),
        ({"rope_type": "yarn", "factor": "big"}, "'factor' must be a number, not 'big'"),
        ({"full_attention": {"rope_type": "default"}}, "differ by layer"),
    ],
)
def test_bad_rope_parameters_are_named(rope: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_rope({"rope_parameters": rope}, 64, 4096, "config.json")


def test_a_length_beyond_what_the_positions_were_made_for_is_refused(tmp_path: Path) -> None:
    make_tiny("llama", tmp_path)
    with pytest.raises(ConfigError, match=r"max_model_len 513 is not within 1\.\.512"):
        load_decoder(tmp_path, max_model_len=513)
