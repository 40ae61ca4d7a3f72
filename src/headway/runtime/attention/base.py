"""Interface of attention backends: the attention of one mixed iteration, over any number of requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from headway.core.errors import ConfigError
from headway.runtime.attention.kv_pool import KvPool


class BatchSegment(NamedTuple):
    """One request's rows in this iteration's flattened batch."""

    start: int
    """Its first row."""
    tokens: int
    """Its rows; 1 for a decode."""
    past: int
    """Tokens of the request whose keys and values are already in the pool."""
    slot_ranges: tuple[tuple[int, int], ...]
    """Its slot ranges (first, count), in token order, covering at least past + tokens."""
    shared: bool = False
    """Its keys lie in other pools as well: store the new ones and leave its rows of the output unset. They are
    attended separately (`partial`)."""


class AttentionPlan(Protocol):
    """A backend's preparation of one iteration, opaque to its callers. Invalid once slots of the pool change owners."""

    @property
    def rows(self) -> int:
        """Rows of the flattened batch."""


class AttentionBackend(Protocol):
    """Attention over a `KvPool`, in two steps: `plan` once an iteration, `run` once a layer."""

    def plan(self, segments: Sequence[BatchSegment], pool: KvPool) -> AttentionPlan:
        """Prepare everything that does not depend on a layer's tensors. Called once, before the first layer.

        Segments are disjoint and together cover rows 0 … T-1 in order. Raises ValueError when they do not, or when a
        segment's runs hold fewer than past + tokens slots.
        """

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> Tensor:
        """Store the new keys and values, then attend causally within each request. Called once a layer.

        q: (T, q_heads, d); k, v: (T, kv_heads, d), rotated, in the pool's dtype; layer counts from the pool's first.
        Returns (T, q_heads, d) in q's dtype, contiguous. The pool holds k and v of all T rows on return.
        """


def kernels_of(backend: AttentionBackend, dtype: torch.dtype) -> str:
    """Return what a backend computes a dtype with, in words."""
    words: Callable[[torch.dtype], str] | None = getattr(backend, "kernels_of", None)
    return "ATen" if words is None else words(dtype)


_BACKENDS = {
    "cpu": ("headway.runtime.attention.cpu", "CpuBackend"),
    "sdpa": ("headway.runtime.attention.sdpa", "SdpaBackend"),
}


def make_backend(name: str) -> AttentionBackend:
    """Return the backend of that name. Called once at start-up; ConfigError lists the known names."""
    if name not in _BACKENDS:
        raise ConfigError(f"unknown attention backend '{name}': known are {', '.join(sorted(_BACKENDS))}")
    module, attribute = _BACKENDS[name]
    backend: AttentionBackend = getattr(import_module(module), attribute)()
    return backend
