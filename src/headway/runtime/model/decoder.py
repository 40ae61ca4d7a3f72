"""The one decoder: rows of many requests, decodes and prefill chunks alike, through any range of layers.

Rows carry their positions; only the attention plan maps rows to requests.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from headway.runtime.attention.base import AttentionBackend, AttentionPlan, make_backend
from headway.runtime.attention.kv_pool import KvPool
from headway.runtime.model.compiled import compiled_layers
from headway.runtime.model.config import DecoderConfig
from headway.runtime.model.rope import RotaryEmbedding, RotaryTable, rotate_
from headway.runtime.model.shard import WHOLE, ModelShard
from headway.runtime.model.weights import DecoderWeights, LayerWeights


class TensorGroup(Protocol):
    """The ranks that share every layer of a stage. Called in the same order on all of them."""

    def sum_(self, x: Tensor) -> Tensor:
        """Overwrite x with its sum over the ranks and return it. The result has the same bits on each rank."""

    def gather(self, x: Tensor, widths: list[int]) -> Tensor | None:
        """Return the ranks' (R, widths[rank]) side by side on rank 0, and None on the others."""


class DecoderModel:
    """A decoder, or the part of one that this process holds (`shard`, summed over `group`).

    Layer 0 of the pool is the first layer held. All methods must run under `torch.inference_mode()`; `forward` enters
    it by itself. The attribute `config` has this rank's own heads and MLP width.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: DecoderWeights,
        backend: AttentionBackend | None = None,
        fingerprint: str = "",
        shard: ModelShard = WHOLE,
        group: TensorGroup | None = None,
    ) -> None:
        self.config = shard.local(config)
        self.shard = shard
        self.group = group
        self.vocabulary = shard.vocabulary(config)
        self._widths = [len(part) for part in shard.vocabularies(config)]
        self.weights = weights
        self.backend = backend or make_backend("cpu")
        self.fingerprint = fingerprint
        sample = weights.layers[0].attention_norm
        self.dtype, self.device = sample.dtype, sample.device
        self._compiled = compiled_layers(self.config, weights) if group is None else None
        self.rotary = RotaryEmbedding(config.rope, config.max_model_len, self.device)

    def make_pool(self, slots: int) -> KvPool:
        """Allocate a KV pool for the layers held here, in the decoder's dtype."""
        config = self.config
        held = len(self.weights.layers)
        return KvPool(held, config.kv_heads, slots, config.head_dim, self.dtype, self.device)

    @torch.inference_mode()
    def forward(self, tokens: Tensor, positions: Tensor, plan: AttentionPlan, logit_rows: Tensor | None) -> Tensor:
        """Run one iteration through the whole model.

        tokens, positions: (T,) int64; plan: this iteration's, from `backend.plan`; logit_rows: (R,) int64, the rows
        whose next token is wanted (None: all). Returns (R, vocab) fp32. Writes T tokens' keys and values to the pool.
        """
        hidden = self.embed(tokens)
        hidden = self.run_layers(hidden, self.rotary_table(positions), plan)
        logits = self.head(hidden if logit_rows is None else hidden.index_select(0, logit_rows))
        assert logits is not None, "logits are rank 0's"
        return logits

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the embeddings (T, hidden) of (T,) token ids."""
        assert self.weights.embedding is not None, "this stage holds no embedding"
        tokens = tokens.to(self.device)
        if self.group is None:
            return functional.embedding(tokens, self.weights.embedding)
        # The vocabulary is cut over the ranks: ids of other ranks give zeros here, and the sum over the ranks is exact.
        local = tokens - self.vocabulary.start
        foreign = (local < 0) | (local >= len(self.vocabulary))
        rows = functional.embedding(local.masked_fill(foreign, 0), self.weights.embedding)
        return self.group.sum_(rows.masked_fill_(foreign.unsqueeze(1), 0.0))

    def rotary_table(self, positions: Tensor) -> RotaryTable:
        """Return the rotation of (T,) positions. Called once an iteration, for all layers."""
        return self.rotary.table(positions.to(self.device), self.dtype)

    def run_layers(
        self, hidden: Tensor, rotary: RotaryTable, plan: AttentionPlan, first: int = 0, last: int | None = None
    ) -> Tensor:
        """Run layers first .. last - 1 of those held (None: to the end). hidden (T, hidden_size) is overwritten.

        Stopping between layers and going on later is exact: all state is in `hidden` and the pool.
        """
        for index in range(first, len(self.weights.layers) if last is None else last):
            self.run_layer(index, hidden, rotary, plan, self.backend)
        # CUDA launches are asynchronous: the executor's clock must not stop before the layers are computed.
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return hidden

    def run_layer(
        self, index: int, hidden: Tensor, rotary: RotaryTable, plan: AttentionPlan, backend: AttentionBackend
    ) -> None:
        """Run one layer, attending by `backend`. hidden (T, hidden_size), contiguous, is overwritten."""
        if self._compiled is not None:
            self._compiled.layer(index, hidden, rotary, plan, backend)
        else:
            self._layer(index, self.weights.layers[index], hidden, rotary, plan, backend)

    def head(self, hidden: Tensor) -> Tensor | None:
        """Return fp32 logits (R, vocab) of rows (R, hidden) after the last layer; None on ranks of a group but 0."""
        weights = self.weights
        assert weights.head is not None, "this stage holds no head"
        assert weights.final_norm is not None, "this stage holds no final norm"
        # None where the head is not in panels; the general path then computes it.
        if self._compiled is not None:
            logits = self._compiled.head(hidden)
            if logits is not None:
                return logits
        logits = weights.head(self._norm(hidden, weights.final_norm)).float()
        return logits if self.group is None else self.group.gather(logits, self._widths)

    def _layer(
        self,
        index: int,
        layer: LayerWeights,
        hidden: Tensor,
        rotary: RotaryTable,
        plan: AttentionPlan,
        backend: AttentionBackend,
    ) -> None:
        config = self.config
        rows, turned = hidden.shape[0], config.q_heads + config.kv_heads
        heads = layer.qkv(self._norm(hidden, layer.attention_norm)).view(rows, -1, config.head_dim)
        query, key, value = heads[:, : config.q_heads], heads[:, config.q_heads : turned], heads[:, turned:]
        if layer.q_norm is not None and layer.k_norm is not None:
            # In place: `query` and `key` are views of `heads`, which is rotated next as one tensor.
            query.copy_(self._norm(query, layer.q_norm))
            key.copy_(self._norm(key, layer.k_norm))
        rotate_(heads[:, :turned], rotary)
        mixed = backend.run(index, query, key, value, plan)
        hidden.add_(self._summed(layer.out(mixed.view(rows, -1))))
        both = layer.gate_up(self._norm(hidden, layer.mlp_norm))
        gate, up = both[:, : config.mlp_size], both[:, config.mlp_size :]
        hidden.add_(self._summed(layer.down(functional.silu(gate).mul_(up))))

    def _summed(self, partial: Tensor) -> Tensor:
        return partial if self.group is None else self.group.sum_(partial)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, weight.shape, weight, self.config.rms_eps)
