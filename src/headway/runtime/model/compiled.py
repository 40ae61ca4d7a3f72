"""The same decoder layer by the compiled kernels: six calls a layer instead of some thirty.

Results are rounded at the same places as the general path or fewer, so both agree within the type's own error.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from headway.runtime.attention.base import AttentionBackend, AttentionPlan
from headway.runtime.attention.native import GeneralKernels, linear_kernels
from headway.runtime.model.config import DecoderConfig
from headway.runtime.model.linear import PackedLinear
from headway.runtime.model.rope import RotaryTable
from headway.runtime.model.weights import DecoderWeights, LayerWeights


class _LinearAddress(NamedTuple):
    """Addresses and sizes of a linear layer."""

    weight: int
    """Address of the panels."""
    bias: int
    """Address; 0: no bias."""
    out: int
    inputs: int


class _LayerAddresses(NamedTuple):
    attention_norm: int
    qkv: _LinearAddress
    out: _LinearAddress
    mlp_norm: int
    gate_up: _LinearAddress
    down: _LinearAddress


class CompiledLayers:
    """Made once a decoder by `compiled_layers`; holds addresses into its weights, which the decoder keeps alive."""

    def __init__(self, config: DecoderConfig, weights: DecoderWeights, native: GeneralKernels) -> None:
        self._config = config
        self._kernels = native
        self._layers = [_addresses(layer) for layer in weights.layers]
        self._head = _matrix(weights.head) if weights.head and weights.head.panels is not None else None
        self._final_norm = weights.final_norm.data_ptr() if weights.final_norm is not None else 0

    def layer(
        self, index: int, hidden: Tensor, rotary: RotaryTable, plan: AttentionPlan, backend: AttentionBackend
    ) -> None:
        """Run one layer over hidden (T, hidden_size), contiguous, overwritten with its output."""
        config, native, layer = self._config, self._kernels, self._layers[index]
        eps, dim = config.rms_eps, config.head_dim
        rows, at = hidden.shape[0], hidden.data_ptr()
        # Queries and keys are rotated, values are not: they lie behind the first `turned` heads.
        turned = config.q_heads + config.kv_heads
        heads = hidden.new_empty(rows, turned + config.kv_heads, dim)
        first = heads.data_ptr()
        weight, bias, out, inputs = layer.qkv
        # The kernel normalises its input itself: the norm's weight and epsilon go with the call.
        native.linear(at, layer.attention_norm, eps, 0, weight, bias, 0, first, rows, out, inputs)
        cos, sin = rotary
        native.rotate(first, cos.data_ptr(), sin.data_ptr(), rows, out, turned, dim, cos.shape[-1])
        query, key, value = torch.split_with_sizes(heads, (config.q_heads, config.kv_heads, config.kv_heads), 1)
        mixed = backend.run(index, query, key, value, plan).contiguous()
        # What follows a row's attention looks at no other row: a piece at a time, its activations stay in the cache:
        # in that of the thread whose rows they are, where threads divide the rows.
        size = hidden.element_size()
        width, across = layer.out.out * size, layer.out.inputs * size
        piece = native.together * torch.get_num_threads()
        both = hidden.new_empty(min(rows, piece), layer.gate_up.out)
        for begin in range(0, rows, piece):
            count, here = min(piece, rows - begin), at + begin * width
            weight, bias, out, inputs = layer.out
            # Residual and output are both `hidden`: the projection adds in place.
            native.linear(mixed.data_ptr() + begin * across, 0, eps, 0, weight, bias, here, here, count, out, inputs)
            weight, bias, out, inputs = layer.gate_up
            native.linear(here, layer.mlp_norm, eps, 0, weight, bias, 0, both.data_ptr(), count, out, inputs)
            weight, bias, out, inputs = layer.down
            # gated = 1: the kernel reads gate and up side by side and applies silu(gate) * up to its input.
            native.linear(both.data_ptr(), 0, eps, 1, weight, bias, here, here, count, out, inputs)

    def head(self, hidden: Tensor) -> Tensor | None:
        """Return logits of hidden (R, hidden_size) in fp32, or None where the head is not held in panels."""
        if self._head is None:
            return None
        weight, bias, out, inputs = self._head
        logits = hidden.new_empty(hidden.shape[0], out)
        self._kernels.linear(
            hidden.data_ptr(), self._final_norm, self._config.rms_eps, 0, weight, bias, 0, logits.data_ptr(),
            hidden.shape[0], out, inputs,
        )  # fmt: skip
        return logits.float()


def compiled_layers(config: DecoderConfig, weights: DecoderWeights) -> CompiledLayers | None:
    """Return the fast path of a decoder, or None where its shapes or the processor do not allow one.

    Called once, at the decoder's construction.

    It needs weights in panels, no head norms (Qwen3), and a rotation of a multiple of 32 dimensions.
    """
    dtype = weights.layers[0].attention_norm.dtype
    native = linear_kernels(dtype)
    if native is None or config.qk_norm or config.rope.rotary_dim % 32:
        return None
    for layer in weights.layers:
        if any(part.panels is None for part in (layer.qkv, layer.out, layer.gate_up, layer.down)):
            return None
        if layer.attention_norm.dtype != dtype:
            return None
    return CompiledLayers(config, weights, native)


def _addresses(layer: LayerWeights) -> _LayerAddresses:
    return _LayerAddresses(
        layer.attention_norm.data_ptr(),
        _matrix(layer.qkv),
        _matrix(layer.out),
        layer.mlp_norm.data_ptr(),
        _matrix(layer.gate_up),
        _matrix(layer.down),
    )


def _matrix(linear: PackedLinear) -> _LinearAddress:
    assert linear.panels is not None
    bias = 0 if linear.bias is None else linear.bias.data_ptr()
    return _LinearAddress(linear.panels.data_ptr(), bias, linear.out_features, linear.in_features)
