"""From a folder to a `Decoder`: check, fuse, pack. Each weight is resident once when this is done."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from headway.attention.base import AttentionBackend
from headway.core.errors import CheckpointError, ConfigError
from headway.model.checkpoint import Checkpoint
from headway.model.config import DecoderConfig, read_config
from headway.model.decoder import Decoder
from headway.model.fields import read_json
from headway.model.linear import Linear
from headway.model.weights import DecoderWeights, LayerWeights

_NEVER_READ = (".rotary_emb.inv_freq", ".masked_bias", ".attn.bias")


def load_decoder(
    path: str | Path,
    dtype: str = "auto",
    max_model_len: int | None = None,
    device: str = "cpu",
    backend: AttentionBackend | None = None,
) -> Decoder:
    """Called once a process, at start-up. Reads config.json and safetensors (one file, or shards with an index).

    dtype: "float32", "bfloat16" or "auto": the checkpoint's own, where float16 becomes float32, which is exact. Peak
    memory is the weights plus one layer. Raises CheckpointError, naming file and tensor, for whatever does not fit, and
    ConfigError for a dtype or max_model_len that cannot work.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such model folder")
    data = read_json(folder / "config.json")
    config = read_config(data, max_model_len, str(folder / "config.json"))
    loader = _Loader(config, Checkpoint(folder), resolve_dtype(dtype, config), torch.device(device))
    weights = loader.load()
    return Decoder(config, weights, backend, loader.checkpoint.fingerprint(data))


def resolve_dtype(name: str, config: DecoderConfig) -> torch.dtype:
    """The type to compute in, from a setting and the checkpoint's own type."""
    if name == "auto":
        name = "bfloat16" if config.checkpoint_dtype == "bfloat16" else "float32"
    if name not in ("float32", "bfloat16"):
        raise ConfigError(f"dtype '{name}' is not supported; supported are auto, float32, bfloat16")
    return torch.float32 if name == "float32" else torch.bfloat16


class _Loader:
    """One load: knows the names and shapes that a family's checkpoint must have."""

    def __init__(self, config: DecoderConfig, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self.checkpoint = checkpoint
        self.dtype = dtype
        self.device = device

    def load(self) -> DecoderWeights:
        config = self.config
        layers = [self._layer(f"model.layers.{index}.") for index in range(config.layers)]
        vocabulary = (config.vocab_size, config.hidden_size)
        embedding = self._plain("model.embed_tokens.weight", vocabulary)
        tied = config.tie_embeddings and "lm_head.weight" not in self.checkpoint
        head = self._fused(("model.embed_tokens.weight" if tied else "lm_head.weight",), vocabulary[:1], vocabulary[1])
        norm = self._plain("model.norm.weight", vocabulary[1:])
        self.checkpoint.check_all_taken(_NEVER_READ)
        return DecoderWeights(layers, embedding, norm, Linear(head))

    def _layer(self, prefix: str) -> LayerWeights:
        config = self.config
        hidden, mlp = config.hidden_size, config.mlp_size
        q_rows, kv_rows = config.q_heads * config.head_dim, config.kv_heads * config.head_dim
        attention, feed = f"{prefix}self_attn.", f"{prefix}mlp."
        qkv = {"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows}
        gate_up = {"gate_proj": mlp, "up_proj": mlp}
        if config.fused_checkpoint:
            qkv, gate_up = {"qkv_proj": q_rows + 2 * kv_rows}, {"gate_up_proj": 2 * mlp}
        head_norm = (config.head_dim,)
        return LayerWeights(
            attention_norm=self._plain(f"{prefix}input_layernorm.weight", (hidden,)),
            qkv=self._linear(attention, qkv, hidden, config.qkv_bias),
            out=self._linear(attention, {"o_proj": hidden}, q_rows, config.out_bias),
            mlp_norm=self._plain(f"{prefix}post_attention_layernorm.weight", (hidden,)),
            gate_up=self._linear(feed, gate_up, hidden, config.mlp_bias),
            down=self._linear(feed, {"down_proj": hidden}, mlp, config.mlp_bias),
            q_norm=self._plain(f"{attention}q_norm.weight", head_norm) if config.qk_norm else None,
            k_norm=self._plain(f"{attention}k_norm.weight", head_norm) if config.qk_norm else None,
        )

    def _linear(self, prefix: str, parts: dict[str, int], inputs: int, biased: bool) -> Linear:
        names, rows = tuple(f"{prefix}{part}" for part in parts), tuple(parts.values())
        weight = self._fused(tuple(f"{name}.weight" for name in names), rows, inputs)
        bias = self._fused(tuple(f"{name}.bias" for name in names), rows, None) if biased else None
        return Linear(weight, bias)

    def _fused(self, names: tuple[str, ...], rows: tuple[int, ...], inputs: int | None) -> Tensor:
        """The named tensors stacked along their rows, in one new tensor. inputs None: vectors."""
        tail = () if inputs is None else (inputs,)
        fused = torch.empty((sum(rows), *tail), dtype=self.dtype, device=self.device)
        for target, name, count in zip(torch.split(fused, list(rows)), names, rows, strict=True):
            target.copy_(self.checkpoint.take(name, (count, *tail)))
        return fused

    def _plain(self, name: str, shape: tuple[int, ...]) -> Tensor:
        copy = torch.empty(shape, dtype=self.dtype, device=self.device)
        return copy.copy_(self.checkpoint.take(name, shape))
