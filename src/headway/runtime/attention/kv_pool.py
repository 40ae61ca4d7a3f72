"""Storage of keys and values: one tensor for all layers, heads and slots of an instance.

A *slot* holds one token's keys and values. Which request owns which blocks is recorded in `headway.kv`, never here; a
request's slots are given as contiguous *ranges*, (first, count) pairs, so that adjacent blocks are one zero-copy view
and one attention call, whatever the block size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.core.errors import ConfigError
from headway.perf.device import available_bytes, gib


class KvPool:
    """The keys and values of `slots` tokens.

    `data` is (layers, 2, kv_heads, slots, head_dim): index 0 of the second axis is keys, 1 is values. It is reserved
    but not touched, so on CPU resident memory grows with the slots that are used, not with the size of the pool. Raises
    ConfigError where that much cannot be reserved.
    """

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        slots: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.layers = layers
        self.kv_heads = kv_heads
        self.slots = slots
        self.head_dim = head_dim
        shape = (layers, 2, kv_heads, slots, head_dim)
        try:
            self.data: Tensor = torch.empty(shape, dtype=dtype, device=device)
        except RuntimeError as error:  # torch has no other for it
            size, free = gib(math.prod(shape) * dtype.itemsize), gib(_free(torch.device(device)))
            raise ConfigError(
                f"there is no memory for a KV cache of {size} ({slots} tokens): {free} is available; give "
                "--kv-cache-memory less"
            ) from error

    @property
    def dtype(self) -> torch.dtype:
        """The element type of keys and values."""
        return self.data.dtype

    @property
    def nbytes(self) -> int:
        """Address space reserved, in bytes."""
        return self.data.numel() * self.data.element_size()

    def narrowed(self, kv_heads: int) -> KvPool:
        """Return a pool of fewer heads and more slots over the same memory, for a rank with some heads of more tokens.

        `narrow_ranges` maps slots between the two. kv_heads divides the number of this pool's heads.
        """
        # No allocation: a narrow head's slots are those of `fold` neighbouring wide heads, one after the other.
        pool = KvPool.__new__(KvPool)
        fold = self.kv_heads // kv_heads
        pool.layers, pool.kv_heads, pool.slots, pool.head_dim = self.layers, kv_heads, fold * self.slots, self.head_dim
        pool.data = self.data.view(self.layers, 2, kv_heads, pool.slots, self.head_dim)
        return pool

    def narrow_ranges(self, kv_heads: int, slot_ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the slot ranges of a narrowed pool that lie in the same memory as these ranges."""
        parts = range(self.kv_heads // kv_heads)
        return [(part * self.slots + first, count) for first, count in slot_ranges for part in parts]

    @staticmethod
    def bytes_per_token(layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Return the bytes of one token's keys and values over all layers, for sizing a pool before it exists."""
        return layers * 2 * kv_heads * head_dim * dtype.itemsize

    def range_views(self, first: int, count: int) -> tuple[Tensor, ...]:
        """Return zero-copy views of one slot range, 2 · layers of them (keys and values of layer 0, of layer 1, …).

        Each is (kv_heads, count, head_dim), ready for `primitive.attend`. Called once for each range and iteration.
        """
        self.check(first, count)
        # Flattening (layers, 2) orders the views keys 0, values 0, keys 1, …: index 2 * layer, and + 1 for values.
        rows = self.data[:, :, :, first : first + count]
        return rows.flatten(0, 1).unbind(0)

    def check(self, first: int, count: int) -> None:
        """Raise ValueError unless the slot range lies in the pool."""
        if first < 0 or count < 0 or first + count > self.slots:
            raise ValueError(f"slots {first}..{first + count} are outside the pool's {self.slots}")


def _free(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_bytes()


# Storing of new keys and values into slot ranges of the pool. `kv.allocator` maps tokens to slots.

_SLICES_WORTH_IT = 64
"""Average tokens a slot range from which one copy per range beats one scattered copy of all."""


@dataclass(frozen=True, slots=True)
class KvWritePlan:
    """Where an iteration's new keys and values go: copies of whole slot ranges, or one scattered copy."""

    slices: tuple[tuple[int, int, tuple[Tensor, ...]], ...] = ()
    """(first row, end row, the range's views by layer): the copies of ranges."""
    rows: Tensor | None = None
    """Rows of the batch to copy to `slots`. None: all."""
    slots: Tensor | None = None
    """Target slots of the scattered copy."""
    planes: tuple[Tensor, ...] = ()
    """The keys and values of each layer, (kv_heads, slots, head_dim)."""

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Copy k and v, (T, kv_heads, head_dim), to their slots of one layer."""
        for plane, fresh in ((2 * layer, k), (2 * layer + 1, v)):
            for start, stop, views in self.slices:
                views[plane].copy_(fresh[start:stop].transpose(0, 1))
            if self.slots is not None:
                chosen = fresh if self.rows is None else fresh.index_select(0, self.rows)
                self.planes[plane].index_copy_(1, self.slots, chosen.transpose(0, 1))


def plan_writes(new: Sequence[tuple[int, int, int]], batch_rows: int, pool: KvPool) -> KvWritePlan:
    """Return the copies for (first row, first slot, tokens) of each new range. Called once an iteration."""
    tokens = sum(count for _, _, count in new)
    # Few or long ranges: contiguous copies. Many short ones: one scattered copy costs less than a call for each.
    if len(new) <= 2 or tokens >= _SLICES_WORTH_IT * len(new):
        return KvWritePlan(tuple((row, row + count, pool.range_views(first, count)) for row, first, count in new))
    slots = torch.cat([torch.arange(first, first + count) for _, first, count in new]).to(pool.data.device)
    rows = None
    # Decodes of the compiled kernel store themselves, so `new` need not cover the batch.
    if tokens != batch_rows:
        rows = torch.cat([torch.arange(row, row + count) for row, _, count in new]).to(pool.data.device)
    return KvWritePlan((), rows, slots, pool.data.flatten(0, 1).unbind(0))
