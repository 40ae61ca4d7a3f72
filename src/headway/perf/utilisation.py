"""Model FLOPs utilisation (MFU) and memory bandwidth utilisation (MBU): what was computed, over what the devices can.

MFU: FLOPs of the model's matrix products and causal attention, over peak FLOP/s. MBU: bytes of weights, once a forward
pass, and of KV that attention reads, over peak bytes/s. Tokens computed again count again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from headway.core.batch import Batch
from headway.perf.hardware import ModelShape, causal_pairs, of_device


@dataclass(frozen=True, kw_only=True)
class UtilisationBase:
    """The denominators of utilisation: all devices of one instance together."""

    shape: ModelShape
    peak_flops: float
    """FLOP/s."""
    peak_bandwidth: float
    """Bytes/s."""
    origin: str = ""
    """Origin of the peaks, in words."""

    def flops(self, tokens: float, pairs: float) -> float:
        """Return the FLOPs of so many rows of forward passes and pairs of query and key."""
        return self.shape.linear_flops(1) * tokens + self.shape.pairs_flops(pairs)

    def bytes_read(self, passes: float, kv_tokens: float) -> float:
        """Return the bytes that so many forward passes read, and so many tokens' KV."""
        shape = self.shape
        return passes * shape.parameters * shape.dtype_bytes + kv_tokens * shape.kv_bytes_per_token


def mean_base(bases: Sequence[UtilisationBase | None]) -> UtilisationBase | None:
    """Return the peaks of an instance in the mean over all of one model; None where those of one are not known."""
    known = [base for base in bases if base is not None]
    if not known or len(known) < len(bases):
        return None
    return UtilisationBase(
        shape=known[0].shape,
        peak_flops=fmean(base.peak_flops for base in known),
        peak_bandwidth=fmean(base.peak_bandwidth for base in known),
        origin=known[0].origin,
    )


@dataclass(frozen=True)
class AttentionWork:
    """What attention does in one batch."""

    kv_tokens: int
    """Tokens whose KV is read."""
    pairs: float
    """Pairs of a query token and a KV token, counted causally."""

    @classmethod
    def of(cls, batch: Batch) -> AttentionWork:
        """Count a batch of one iteration, its remote attention included."""
        read, pairs = 0, 0.0
        for part in batch.parts:
            read += part.decodes.kv_sum + sum(chunk.start + chunk.tokens - chunk.base for chunk in part.prefills)
            pairs += part.decodes.kv_sum
            pairs += sum(causal_pairs(chunk.tokens, chunk.start - chunk.base) for chunk in part.prefills)
            read += sum(remote.tokens for remote in part.assists)
            pairs += sum(remote.rows * remote.tokens for remote in part.assists)
        return cls(read, pairs)


PRODUCT_ROWS = 512
"""Rows and columns of the square matrices whose product measures a device's arithmetic."""
READ_MIB = 64
"""Size of the matrix whose product with a vector measures a device's memory: more than the caches of most."""
Measure = Callable[[str, int, int, int], float]
"""Seconds of (kind, first, second, repeats), as `runtime.executor.measure` has them."""


def utilisation_base(shape: ModelShape, devices: int, device_name: str | None, measure: Measure) -> UtilisationBase:
    """Return the peaks of `devices` equal devices: a data sheet's where there is one, else measured (0.1 s).

    device_name: the accelerator's; None: CPUs.
    """
    sheet = None if device_name is None else of_device(device_name)
    if sheet is not None:
        return UtilisationBase(
            shape=shape, peak_flops=sheet.flops * devices, peak_bandwidth=sheet.bandwidth * devices,
            origin=sheet.source,
        )  # fmt: skip
    flops = 2.0 * PRODUCT_ROWS**3 / measure("product", PRODUCT_ROWS, 0, 3)
    bandwidth = READ_MIB * 2.0**20 / measure("read", READ_MIB, 0, 3)
    return UtilisationBase(
        shape=shape, peak_flops=flops * devices, peak_bandwidth=bandwidth * devices, origin="measured at start-up"
    )
