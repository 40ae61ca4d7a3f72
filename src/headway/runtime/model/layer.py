"""The arithmetic of one decoder layer around attention, on any rows, with any cut of its matrices."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional

from headway.runtime.model.config import DecoderConfig
from headway.runtime.model.rope import RotaryTable, rotate_
from headway.runtime.model.weights import LayerWeights

Matrix = Callable[[Tensor], Tensor]
"""A linear layer, (rows, in) to (rows, out): a `PackedLinear`, or whole weights gathered for one use."""


def norm(x: Tensor, weight: Tensor, config: DecoderConfig) -> Tensor:
    """Return x, RMS-normalised over its last dimension and scaled by weight."""
    return functional.rms_norm(x, weight.shape, weight, config.rms_eps)


def heads(
    x: Tensor, qkv: Matrix, layer: LayerWeights, kv_heads: int, rotary: RotaryTable, config: DecoderConfig
) -> Tensor:
    """Project normalised rows x to (rows, q + 2 · kv heads, head_dim): rotated queries and keys, then values.

    kv_heads: those of `qkv`, which may be a slice of the layer's. Head norms and head_dim are `layer`'s and `config`'s.
    """
    flat = qkv(x)
    stacked = flat.view(x.shape[0], flat.shape[1] // config.head_dim, config.head_dim)
    turned = stacked.shape[1] - kv_heads
    # Columns are query heads, then key heads, then value heads: there are as many keys as values.
    queries = turned - kv_heads
    if layer.q_norm is not None and layer.k_norm is not None:
        stacked[:, :queries].copy_(norm(stacked[:, :queries], layer.q_norm, config))
        stacked[:, queries:turned].copy_(norm(stacked[:, queries:turned], layer.k_norm, config))
    rotate_(stacked[:, :turned], rotary)
    return stacked


def feed(x: Tensor, gate_up: Matrix, down: Matrix) -> Tensor:
    """Return the gated MLP of normalised rows x: down(silu(gate(x)) * up(x))."""
    both = gate_up(x)
    size = both.shape[1] // 2
    return down(functional.silu(both[:, :size]).mul_(both[:, size:]))
