"""Named model shapes, as their published configurations give them, and the shape of any Hugging Face config.

The papers' names lead here: Medha and Mnemosyne serve Llama-3 8B and 70B; Tetris Llama-3 8B, 70B (and 405B in Fig. 2);
PecSched Mistral-v0.3 7B, Phi-3 14B, Yi 34B and Llama-3.1 70B (Table 5); the others are those that profiles exist for.
Context extension (RoPE scaling) changes no shape.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headway.core.errors import ConfigError
from headway.perf.hardware.shapes import ModelShape


def _shape(
    layers: int,
    hidden: int,
    heads: tuple[int, int],
    mlp: int,
    vocab: int,
    head_dim: int = 128,
    matrices: int = 3,
    parallel_block: bool = False,
) -> ModelShape:
    return ModelShape(
        layers=layers,
        hidden=hidden,
        q_heads=heads[0],
        kv_heads=heads[1],
        head_dim=head_dim,
        mlp=mlp,
        vocab=vocab,
        mlp_matrices=matrices,
        parallel_block=parallel_block,
    )


MODELS: dict[str, ModelShape] = {
    "llama-3-8b": _shape(32, 4096, (32, 8), 14336, 128256),
    "llama-3-70b": _shape(80, 8192, (64, 8), 28672, 128256),
    "llama-3-405b": _shape(126, 16384, (128, 8), 53248, 128256),
    "llama-2-7b": _shape(32, 4096, (32, 32), 11008, 32000),
    "llama-2-13b": _shape(40, 5120, (40, 40), 13824, 32000),
    "llama-2-70b": _shape(80, 8192, (64, 8), 28672, 32000),
    "codellama-34b": _shape(48, 8192, (64, 8), 22016, 32000),
    "qwen-72b": _shape(80, 8192, (64, 64), 24576, 152064),
    "qwen2.5-7b": _shape(28, 3584, (28, 4), 18944, 152064),
    "qwen2.5-72b": _shape(80, 8192, (64, 8), 29568, 152064),
    "yi-34b": _shape(60, 7168, (56, 8), 20480, 64000),
    "mistral-7b": _shape(32, 4096, (32, 8), 14336, 32768),
    "phi-2": _shape(32, 2560, (32, 32), 10240, 51200, head_dim=80, matrices=2, parallel_block=True),
    "phi-3-14b": _shape(40, 5120, (40, 10), 17920, 32064),
    "internlm-20b": _shape(60, 5120, (40, 40), 13824, 103168),
}

ALIASES = {
    "llama-3.1-8b": "llama-3-8b",
    "llama-3.1-70b": "llama-3-70b",
    "llama-3.1-405b": "llama-3-405b",
    "meta-llama-3-8b": "llama-3-8b",
    "meta-llama-3-70b": "llama-3-70b",
    "llama-2-7b-hf": "llama-2-7b",
    "llama-2-70b-hf": "llama-2-70b",
    "mistral-v0.3-7b": "mistral-7b",
    "phi-3-medium": "phi-3-14b",
}


def model_name(name: str) -> str:
    """Return the canonical name. Raises ConfigError, listing those that exist, for an unknown one."""
    key = name.lower().rsplit("/", 1)[-1]
    key = ALIASES.get(key, key)
    if key not in MODELS:
        raise ConfigError(f"unknown model {name!r}; known: {', '.join(MODELS)}; or give the path of a config.json")
    return key


def model(name: str) -> ModelShape:
    """Return a shape by name or alias, with or without a Hugging Face owner before it, or by the path of a checkpoint's
    folder or `config.json`. Raises ConfigError."""
    path = Path(name)
    if path.is_dir() or path.suffix == ".json":
        return from_config_file(path)
    return MODELS[model_name(name)]


def from_config_file(path: Path) -> ModelShape:
    """Return the shape in a `config.json`, or in that of a folder. Raises ConfigError that names the file."""
    file = path / "config.json" if path.is_dir() else path
    try:
        data = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"model: {file} cannot be read as JSON: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"model: {file} must hold a JSON object")
    return from_hf_config(data)


def from_hf_config(config: Mapping[str, Any]) -> ModelShape:
    """Return the shape of a Llama-like decoder from its `config.json`. Raises ConfigError that names missing keys."""
    # Multimodal models nest the decoder's keys.
    text = config.get("text_config", config)
    missing = [k for k in ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size") if k not in text]
    if missing:
        raise ConfigError(f"the model's config lacks {', '.join(missing)}")
    heads = int(text["num_attention_heads"])
    hidden = int(text["hidden_size"])
    # SiLU models have a gate matrix beside up and down (SwiGLU).
    gated = str(text.get("hidden_act", text.get("activation_function", "silu"))).lower() in ("silu", "swiglu")
    # Configurations of older models omit the width: four times the hidden size.
    wide = 4 * hidden if text.get("intermediate_size") is None else int(text["intermediate_size"])
    dtype = str(text.get("torch_dtype") or text.get("dtype") or "bfloat16")
    return ModelShape(
        layers=int(text["num_hidden_layers"]),
        hidden=hidden,
        q_heads=heads,
        kv_heads=int(text.get("num_key_value_heads") or heads),
        head_dim=int(text.get("head_dim") or hidden // heads),
        mlp=wide,
        vocab=int(text["vocab_size"]),
        dtype_bytes=4 if "float32" in dtype else 2,
        tied_embeddings=bool(text.get("tie_word_embeddings", False)),
        mlp_matrices=3 if gated else 2,
        parallel_block=_is_parallel(text),
    )


def _is_parallel(config: Mapping[str, Any]) -> bool:
    """Whether attention and MLP of a layer read the same rows: by the model's type, or by the key that says so."""
    stated = config.get("use_parallel_residual", config.get("parallel_attn"))
    return bool(config.get("model_type") in ("phi", "gptj", "cohere") if stated is None else stated)
