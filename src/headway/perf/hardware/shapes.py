"""The shape of a decoder: what its weights, KV and arithmetic cost, in bytes and FLOPs.

One FLOP is one multiply or one add (a multiply-accumulate counts two). Causal attention is counted as causal.
"""

from __future__ import annotations

import msgspec


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """Dimensions of a Llama-like decoder (grouped-query attention, gated MLP). `dtype_bytes` is of weights and KV."""

    layers: int
    hidden: int
    q_heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    dtype_bytes: int = 2
    tied_embeddings: bool = False
    mlp_matrices: int = 3

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer's matrices (norms and biases are left out: below 0.1%)."""
        attention = self.hidden * self.head_dim * (2 * self.q_heads + 2 * self.kv_heads)
        return attention + self.mlp_matrices * self.hidden * self.mlp

    @property
    def parameters(self) -> int:
        """All matrices: layers, embedding, and the LM head where it is its own."""
        tables = 1 if self.tied_embeddings else 2
        return self.layers * self.layer_parameters + tables * self.vocab * self.hidden

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values that one token leaves in the cache, over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype_bytes

    def linear_flops(self, tokens: int) -> float:
        """FLOPs of all layers' matrix products for `tokens` rows (LM head not counted)."""
        return 2.0 * tokens * self.layers * self.layer_parameters

    def attention_flops(self, tokens: int, past: int) -> float:
        """FLOPs of causal attention for a chunk of `tokens` rows over `past` cached tokens, over all layers.

        Scores and values are 2 FLOPs per row, key and head dimension each; a chunk's own triangle counts half.
        """
        pairs = tokens * past + tokens * (tokens + 1) / 2
        return 4.0 * self.layers * self.q_heads * self.head_dim * pairs
