"""Tiny random checkpoints of every supported family, written by transformers itself.

`make_tiny("llama", path)` takes 10 to 50 ms. Used wherever a test needs a model folder rather than a model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

_SHAPE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}

_FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": None, "head_dim": 16}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 16}),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {"original_max_position_embeddings": 512}),
    "yi": ("LlamaConfig", "LlamaForCausalLM", {"num_attention_heads": 8, "num_key_value_heads": 1}),
}

_YI_FIELDS = {"rope_theta": 5_000_000.0, "rope_scaling": None, "pretraining_tp": 1}
"""What the published config.json of Yi (01-ai/Yi-6B: Llama's class, eight query heads a KV head) has at its top level,
in the form of the transformers that it was written with."""

FAMILIES = tuple(_FAMILIES)


def make_tiny(family: str, path: str | Path, *, seed: int = 0, dtype: str = "float32", **overrides: Any) -> Path:
    """Write a checkpoint of that family into `path` and return it. Overrides are fields of its transformers config.

    Weights are large enough (standard deviation 0.3, biases and norms random too) that attention is far from uniform
    and that a mistake anywhere moves the logits.
    """
    import transformers

    config_name, model_name, own = _FAMILIES[family]
    config = getattr(transformers, config_name)(**{**_SHAPE, **own, **overrides})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(transformers, model_name)(config)
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.data.normal_(1.0, 0.2)
            else:
                weight.data.normal_(0.0, 0.3)
    model.to(getattr(torch, dtype)).save_pretrained(path, safe_serialization=True)
    if family == "yi":
        file = Path(path) / "config.json"
        fields = json.loads(file.read_text())
        for newer in ("rope_parameters", "dtype", "head_dim"):
            fields.pop(newer, None)
        file.write_text(json.dumps(fields | _YI_FIELDS | {"torch_dtype": dtype}, indent=2))
    return Path(path)
