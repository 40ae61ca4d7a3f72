"""A decoder's weights, fused and laid out for the processor that reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from headway.runtime.attention.native import GeneralKernels, linear_kernels

PANEL = 16
"""Columns of the result in a panel of `headway_linear`."""


class PackedLinear:
    """y = x Wᵀ + b. Takes ownership of `weight` (out, in): a reference kept elsewhere holds its memory twice.

    On CPU the weight is laid out once: in panels for the compiled kernel where it runs, and else for oneDNN, which
    would otherwise re-lay it at every call, half of the time at 1 to 64 rows.
    """

    __slots__ = ("_native", "_packed", "_weight", "bias", "in_features", "out_features")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self._native = _kernels_for(weight)
        self._packed = self._native is None and _onednn_packs(weight)
        if self._native is not None:
            weight = _panels(weight, self._native.pairs)
        # 8: the rows that oneDNN is to optimise the layout for; results do not depend on it.
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, 8) if self._packed else weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """Return (rows, out) from x (rows, in), contiguous, in the weight's dtype."""
        if self._native is not None:
            out = x.new_empty(x.shape[0], self.out_features)
            bias = 0 if self.bias is None else self.bias.data_ptr()
            self._native.linear(
                x.contiguous().data_ptr(), 0, 0.0, 0, self._weight.data_ptr(), bias, 0, out.data_ptr(),
                x.shape[0], self.out_features, self.in_features,
            )  # fmt: skip
            return out
        if self._packed:
            packed: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self.bias, "none", [], "")
            return packed
        return functional.linear(x, self._weight, self.bias)

    @property
    def panels(self) -> Tensor | None:
        """The weight as `headway_linear` reads it; None where it is laid out otherwise."""
        return None if self._native is None else self._weight

    def dense(self) -> Tensor:
        """Return the weight as (out, in), unpacked into a copy where it is laid out otherwise."""
        if self._native is not None:
            # Undo `_panels`: (panels, in / pairs, 16, pairs) back to rows of `in`, without the last panel's padding.
            return self._weight.transpose(1, 2).reshape(-1, self.in_features)[: self.out_features]
        return self._weight.to_dense() if self._packed else self._weight

    @property
    def parameters(self) -> int:
        """Number of elements of weight and bias."""
        return self.out_features * (self.in_features + (self.bias is not None))


def _kernels_for(weight: Tensor) -> GeneralKernels | None:
    """Return the compiled kernels where they suit this weight and are the fastest."""
    fits = weight.device.type == "cpu" and weight.shape[1] % 32 == 0
    return linear_kernels(weight.dtype) if fits else None


def _onednn_packs(weight: Tensor) -> bool:
    """Whether oneDNN can lay this weight out here: it refuses bf16 on processors without AVX-512 (or
    AVX-NE-CONVERT)."""
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    return weight.dtype != torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _panels(weight: Tensor, pairs: int) -> Tensor:
    """Re-lay (out, in) as (out / 16, in / pairs, 16, pairs), the last panel padded with zeros."""
    rows, inputs = weight.shape
    if rows % PANEL:
        weight = functional.pad(weight, (0, 0, 0, PANEL - rows % PANEL))
    # Two inputs lie side by side for each output where vdpbf16ps multiplies pairs of bf16.
    return weight.view(-1, PANEL, inputs // pairs, pairs).transpose(1, 2).contiguous()


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
