"""A decoder's tensors, fused the way the forward pass reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from headway.runtime.model.linear import PackedLinear


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. qkv stacks q, k and v heads in that order; gate_up stacks gate and up. Norms are (hidden,).

    q_norm and k_norm, (head_dim,), only where the family normalises heads.
    """

    attention_norm: Tensor
    qkv: PackedLinear
    out: PackedLinear
    mlp_norm: Tensor
    gate_up: PackedLinear
    down: PackedLinear
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """What one process holds of a model. A pipeline stage holds some layers, and perhaps no embedding or head.

    embedding: (vocab, hidden). With tied embeddings the head still has its own packed copy: look-up needs plain rows.
    """

    layers: Sequence[LayerWeights]
    embedding: Tensor | None
    final_norm: Tensor | None
    head: PackedLinear | None

    @property
    def parameters(self) -> int:
        """Numbers held, a tied head counted as held: twice."""
        count = sum(held.numel() for held in (self.embedding, self.final_norm) if held is not None)
        count += self.head.parameters if self.head else 0
        for layer in self.layers:
            count += sum(part.parameters for part in (layer.qkv, layer.out, layer.gate_up, layer.down))
            norms = (layer.attention_norm, layer.mlp_norm, layer.q_norm, layer.k_norm)
            count += sum(norm.numel() for norm in norms if norm is not None)
        return count
