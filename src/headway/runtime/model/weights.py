"""A decoder's weight tensors, fused as the forward pass reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from headway.runtime.model.linear import PackedLinear


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of one layer."""

    attention_norm: Tensor
    """(hidden,)."""
    qkv: PackedLinear
    """Query, key and value heads stacked in this order."""
    out: PackedLinear
    mlp_norm: Tensor
    """(hidden,)."""
    gate_up: PackedLinear
    """Gate and up projections stacked in this order."""
    down: PackedLinear
    q_norm: Tensor | None = None
    """(head_dim,), only where the family normalises heads."""
    k_norm: Tensor | None = None
    """(head_dim,), likewise."""


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """The weights that one process holds. A pipeline stage holds some layers, and perhaps no embedding or head."""

    layers: Sequence[LayerWeights]
    embedding: Tensor | None
    """(vocab, hidden)."""
    final_norm: Tensor | None
    head: PackedLinear | None
    """With tied embeddings a separate packed copy: look-up needs plain rows."""

    @property
    def parameters(self) -> int:
        """Number of weights held. A tied head counts twice, as it is held."""
        count = sum(held.numel() for held in (self.embedding, self.final_norm) if held is not None)
        count += self.head.parameters if self.head else 0
        for layer in self.layers:
            count += sum(part.parameters for part in (layer.qkv, layer.out, layer.gate_up, layer.down))
            norms = (layer.attention_norm, layer.mlp_norm, layer.q_norm, layer.k_norm)
            count += sum(norm.numel() for norm in norms if norm is not None)
        return count
