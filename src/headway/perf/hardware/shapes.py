"""Arithmetic of a decoder: parameters, bytes and FLOPs of its weights, KV and operators.

One FLOP is one multiply or one add (a multiply-accumulate counts two). Causal attention is counted as causal. Counts
are exact integers; a caller divides by rates only at the end.
"""

from __future__ import annotations

import msgspec


class DecoderShape(msgspec.Struct, frozen=True, kw_only=True):
    """Dimensions of a Llama-like decoder (grouped-query attention, MLP), or of one rank's part of it."""

    layers: int
    hidden: int
    q_heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    """Width of the MLP."""
    vocab: int
    dtype_bytes: int = 2
    """Bytes of a weight, an activation or an element of KV."""
    mlp_matrices: int = 3
    """3: gated MLP (gate, up, down); 2: up and down."""
    parallel_block: bool = False
    """Attention and MLP read the same normalised rows (Phi-2, GPT-J, Falcon), so that a layer has one norm."""

    # -- one layer: matrix products as (k, n), for rows × k times k × n ----------------------------------------------

    @property
    def q_width(self) -> int:
        """Elements of one token's queries."""
        return self.q_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Elements of one token's keys and values together."""
        return 2 * self.kv_heads * self.head_dim

    @property
    def rotary_width(self) -> int:
        """Elements of one token that rotary embedding changes: queries and keys."""
        return (self.q_heads + self.kv_heads) * self.head_dim

    @property
    def qkv(self) -> tuple[int, int]:
        """The fused query, key and value product."""
        return self.hidden, self.q_width + self.kv_width

    @property
    def out(self) -> tuple[int, int]:
        """The attention output product."""
        return self.q_width, self.hidden

    @property
    def up(self) -> tuple[int, int]:
        """The up product; gate and up together where the MLP is gated."""
        return self.hidden, (self.mlp_matrices - 1) * self.mlp

    @property
    def down(self) -> tuple[int, int]:
        """The down product."""
        return self.mlp, self.hidden

    @property
    def head(self) -> tuple[int, int]:
        """The LM head's product (once, not in each layer)."""
        return self.hidden, self.vocab

    @property
    def attention_parameters(self) -> int:
        """Parameters of one layer's attention matrices."""
        return sum(k * n for k, n in (self.qkv, self.out))

    @property
    def mlp_parameters(self) -> int:
        """Parameters of one layer's MLP matrices."""
        return sum(k * n for k, n in (self.up, self.down))

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer's matrices (norms and biases are left out: below 0.1%)."""
        return self.attention_parameters + self.mlp_parameters

    @property
    def layer_kv_bytes(self) -> int:
        """Bytes of keys and values that one token leaves in one layer."""
        return self.kv_width * self.dtype_bytes

    def heads_divide(self, ranks: int) -> bool:
        """Return whether query and KV heads can be divided evenly by so many ranks, KV heads also by repeating them."""
        return self.q_heads % ranks == 0 and (self.kv_heads % ranks == 0 or ranks % self.kv_heads == 0)

    @property
    def pair_flops(self) -> int:
        """FLOPs of one layer's attention for one pair of query and key: scores and values are 2 FLOPs per head
        dimension each."""
        return 4 * self.q_width

    # -- all layers --------------------------------------------------------------------------------------------------

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values that one token leaves in all layers."""
        return self.layers * self.layer_kv_bytes

    def linear_flops(self, tokens: int) -> float:
        """Return the FLOPs of all layers' matrix products for `tokens` rows (LM head not counted)."""
        return matmul_flops(tokens * self.layers, self.layer_parameters)

    def attention_flops(self, tokens: int, past: int) -> float:
        """Return the FLOPs of all layers' causal attention for a chunk of `tokens` rows over `past` cached tokens."""
        return self.pairs_flops(causal_pairs(tokens, past))

    def pairs_flops(self, pairs: float) -> float:
        """Return the FLOPs of all layers' attention for so many pairs of query and key."""
        return float(self.layers * self.pair_flops) * pairs


class ModelShape(DecoderShape, frozen=True, kw_only=True):
    """Dimensions of a whole model."""

    tied_embeddings: bool = False
    """The LM head shares the embedding's weights."""

    @property
    def parameters(self) -> int:
        """Parameters of all matrices: layers, embedding, and the LM head where it is its own."""
        tables = 1 if self.tied_embeddings else 2
        return self.layers * self.layer_parameters + tables * self.vocab * self.hidden


def matmul_flops(rows: float, parameters: int) -> float:
    """Return the FLOPs of `rows` rows through matrices of so many parameters."""
    return 2.0 * rows * parameters


def causal_pairs(tokens: int, past: int) -> float:
    """Return the pairs of query and key of a causal chunk of `tokens` rows over `past` cached tokens: its own triangle
    counts half, with the diagonal."""
    return tokens * past + tokens * (tokens + 1) / 2
