"""Table of the supported model families. One decoder runs them all; a row describes a family's checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headway.core.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class FamilySpec:
    """Properties of an architecture that its config.json does not state."""

    name: str
    qkv_bias: bool | None = False
    """A bias where config.json has no `attention_bias`. None: config.json decides, absent means false."""
    out_bias: bool | None = False
    mlp_bias: bool | None = False
    """Likewise with `mlp_bias`."""
    qk_norm: bool = False
    """Query and key heads are RMS-normalised before rotation."""
    fused: bool = False
    """The checkpoint holds qkv_proj and gate_up_proj as single tensors."""
    windowed: bool = False
    """`sliding_window` of config.json applies."""
    window_switch: bool = False
    """`sliding_window` applies only where `use_sliding_window` is true, and to layers that `layer_types` names."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What transformers takes for fields that config.json leaves out, where it is not what the other families have."""


_QWEN: Mapping[str, Any] = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}
FAMILIES: dict[str, FamilySpec] = {
    "LlamaForCausalLM": FamilySpec("llama", qkv_bias=None, out_bias=None, mlp_bias=None),
    "YiForCausalLM": FamilySpec("yi"),
    "MistralForCausalLM": FamilySpec(
        "mistral", windowed=True, defaults={"num_key_value_heads": 8, "sliding_window": 4096}
    ),
    "Qwen2ForCausalLM": FamilySpec("qwen2", qkv_bias=True, windowed=True, window_switch=True, defaults=_QWEN),
    "Qwen3ForCausalLM": FamilySpec(
        "qwen3", qkv_bias=None, out_bias=None, qk_norm=True, windowed=True, window_switch=True,
        defaults={**_QWEN, "head_dim": 128},
    ),
    "Phi3ForCausalLM": FamilySpec("phi3", fused=True, windowed=True, defaults={"rms_norm_eps": 1e-5}),
}  # fmt: skip


def family_of(architecture: str) -> FamilySpec:
    """Return the row of an architecture named in config.json; CheckpointError lists the supported ones."""
    if architecture not in FAMILIES:
        raise CheckpointError(
            f"architecture '{architecture}' is not supported; supported are {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[architecture]
