"""A decoder with random weights, made in memory: for benchmarks, profiling and tests that need a shape, not a model."""

from __future__ import annotations

import torch
from torch import Tensor

from headway.runtime.model.config import DecoderConfig, RopeConfig
from headway.runtime.model.decoder import DecoderModel, DecoderWeights, LayerWeights, PackedLinear


def reference_config(max_model_len: int = 131072) -> DecoderConfig:
    """The small Llama shape that this repository's CPU figures are stated for (27 M parameters)."""
    return DecoderConfig(
        architecture="LlamaForCausalLM",
        vocab_size=4096,
        hidden_size=512,
        layers=8,
        q_heads=8,
        kv_heads=2,
        head_dim=64,
        mlp_size=1536,
        rms_eps=1e-5,
        rope=RopeConfig("default", 500000.0, 64, max_model_len),
        max_positions=max_model_len,
        max_model_len=max_model_len,
    )


def random_decoder(config: DecoderConfig, dtype: torch.dtype = torch.float32, seed: int = 0) -> DecoderModel:
    """A decoder of that shape. The same seed gives the same weights: normal, deviation 1/sqrt(inputs)."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(out: int, inputs: int) -> Tensor:
        return torch.randn(out, inputs, generator=generator).mul_(inputs**-0.5).to(dtype)

    def bias(out: int, wanted: bool) -> Tensor | None:
        return (torch.randn(out, generator=generator) * 0.1).to(dtype) if wanted else None

    def ones(size: int) -> Tensor:
        return torch.ones(size, dtype=dtype)

    heads, hidden, mlp = config.q_heads * config.head_dim, config.hidden_size, config.mlp_size
    stacked = heads + 2 * config.kv_heads * config.head_dim
    layers = [
        LayerWeights(
            attention_norm=ones(hidden),
            qkv=PackedLinear(matrix(stacked, hidden), bias(stacked, config.qkv_bias)),
            out=PackedLinear(matrix(hidden, heads), bias(hidden, config.out_bias)),
            mlp_norm=ones(hidden),
            gate_up=PackedLinear(matrix(2 * mlp, hidden), bias(2 * mlp, config.mlp_bias)),
            down=PackedLinear(matrix(hidden, mlp), bias(hidden, config.mlp_bias)),
            q_norm=ones(config.head_dim) if config.qk_norm else None,
            k_norm=ones(config.head_dim) if config.qk_norm else None,
        )
        for _ in range(config.layers)
    ]
    embedding = torch.randn(config.vocab_size, hidden, generator=generator).to(dtype)
    head = embedding.clone() if config.tie_embeddings else matrix(config.vocab_size, hidden)
    return DecoderModel(
        config, DecoderWeights(layers, embedding, ones(hidden), PackedLinear(head)), fingerprint=f"random-{seed}"
    )
