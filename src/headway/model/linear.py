"""A linear layer over weights that are laid out once, at load, for the processor that will read them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from headway.attention.native import kernels


class Linear:
    """y = x Wᵀ + b. `weight` (out, in) is taken over: keep no reference, or its memory is held twice.

    On CPU the weight is packed for oneDNN, which would otherwise re-lay it at every call: half of the time at 1 to 64
    rows. The exception is bf16 where the compiled kernels are available: these read the plain layout, and faster still.
    A packed weight cannot be read in place or cut any more; `plain` is None then.
    """

    __slots__ = ("_packed", "_weight", "bias", "in_features", "out_features")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self._packed = weight.device.type == "cpu" and bool(torch._C._has_mkldnn) and not few_rows_fit(weight)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, 8) if self._packed else weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """x: (rows, in), contiguous, in the weight's dtype; returns (rows, out)."""
        if self._packed:
            out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self.bias, "none", [], "")
            return out
        return functional.linear(x, self._weight, self.bias)

    @property
    def plain(self) -> Tensor | None:
        """The weight (out, in), where it was kept readable."""
        return None if self._packed else self._weight

    def dense(self) -> Tensor:
        """The weight (out, in), readable: unpacked into a copy where it was packed."""
        return self._weight.to_dense() if self._packed else self._weight

    @property
    def parameters(self) -> int:
        """Numbers in weight and bias."""
        return self.out_features * (self.in_features + (self.bias is not None))


def few_rows_fit(weight: Tensor) -> bool:
    """Whether `headway_linear` can run over this weight here."""
    rows, inputs = weight.shape
    shaped = weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and inputs % 32 == 0 and rows >= 16
    return shaped and weight.is_contiguous() and kernels() is not None
