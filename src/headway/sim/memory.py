"""Memory plan of an instance: weights, activations and KV of the fullest rank against the device's memory.

Activations are those of one layer at its widest for the largest iteration: `max_num_batched_tokens` rows with chunked
prefill, the longest prompt with `whole` (for which whole-prompt prefill runs out of memory).
"""

from __future__ import annotations

from dataclasses import dataclass

from headway.core.errors import ConfigError
from headway.perf.hardware.accelerators import AcceleratorSpec
from headway.perf.hardware.memory import gib
from headway.perf.hardware.shapes import ModelShape
from headway.perf.latency.layout import ParallelLayout, cut
from headway.policy.iteration.config import SchedulerConfig


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of one rank, in bytes."""

    usable: int
    """Device memory × the share that may be used."""
    weights: int
    activations: int
    kv_bytes_per_token: int
    """This rank's share of a token's KV."""

    @property
    def kv_tokens(self) -> int:
        """Tokens of whole requests that the KV cache of this rank's group holds; each rank stores its share of them."""
        return max(0, self.usable - self.weights - self.activations) // self.kv_bytes_per_token


class InfeasibleError(ConfigError):
    """Raised for a layout that does not fit in memory. Sweeps report it as a point without runs instead of stopping."""


def plan_memory(
    device: AcceleratorSpec,
    shape: ModelShape,
    layout: ParallelLayout,
    config: SchedulerConfig,
    longest: tuple[int, int],
    utilisation: float,
) -> MemoryPlan:
    """Return the plan of the fullest rank. `longest`: (tokens of the longest prompt, tokens of the longest request).

    Raises InfeasibleError, with the numbers, where the longest request does not fit.
    """
    ranks = [cut(shape, layout, stage) for stage in {0, layout.stages - 1}]
    rank = max(ranks, key=lambda r: r.weight_bytes)
    rows = longest[0] if config.chunking == "whole" else min(config.max_num_batched_tokens, _static(config))
    # residual and normalised input, plus the wider of attention (QKV and its output) and MLP (up and down input)
    widest = 2 * rank.hidden + max(rank.qkv[1] + rank.out[0], rank.up[1] + rank.mlp)
    # one row of logits for each sequence, in float32
    logits = config.max_num_seqs * rank.vocab * 4
    plan = MemoryPlan(
        usable=int(device.capacity * utilisation),
        weights=rank.weight_bytes,
        activations=rows * widest * rank.dtype_bytes + logits,
        # stages may hold different numbers of layers: the one with most layers limits the tokens
        kv_bytes_per_token=max(r.kv_bytes_per_token for r in ranks),
    )
    # KV groups share one request, so together they must hold the longest
    if plan.kv_tokens * layout.kvp < longest[1]:
        raise InfeasibleError(
            f"{layout.name} on {device.name}: of {gib(plan.usable)} usable a device, weights take {gib(plan.weights)} "
            f"and activations of {rows:,} rows {gib(plan.activations)}; that leaves KV for {plan.kv_tokens:,} tokens "
            f"({plan.kv_bytes_per_token:,} bytes a token and rank) and the longest request has {longest[1]:,}"
        )
    return plan


def _static(config: SchedulerConfig) -> int:
    kind, _, tokens = config.chunking.partition(":")
    return int(tokens) if kind == "static" else config.max_num_batched_tokens
