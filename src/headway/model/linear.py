"""A linear layer over weights that are laid out once, at load, for the processor that will read them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


class Linear:
    """y = x Wᵀ + b. `weight` (out, in) is taken over: keep no reference, or its memory is held twice.

    On CPU the weight is packed for oneDNN, which would otherwise re-lay it at every call: half of the time at 1 to 64
    rows, in either dtype. A packed weight has no readable layout, so cut it before (tensor parallelism), not after.
    """

    __slots__ = ("_bias", "_packed", "_weight", "in_features", "out_features")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self._packed = weight.device.type == "cpu" and bool(torch._C._has_mkldnn)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, 8) if self._packed else weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """x: (rows, in), contiguous, in the weight's dtype; returns (rows, out)."""
        if self._packed:
            out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
            return out
        return F.linear(x, self._weight, self._bias)

    @property
    def parameters(self) -> int:
        """Numbers in weight and bias."""
        return self.out_features * (self.in_features + (self._bias is not None))
