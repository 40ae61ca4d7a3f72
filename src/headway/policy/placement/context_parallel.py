"""Unchunked context parallelism: every prompt over all prefill instances as one ring, one after another.

Prompts are neither chunked nor preempted: a long one holds the whole pool (the baseline of Medha Fig. 5b and Mnemosyne
Fig. 14, at cluster level).
"""

from __future__ import annotations

from typing import Literal

from headway.policy.placement.fixed_sp import FixedSp, FixedSpOptions
from headway.policy.placement.registry import PolicyContext, PolicyOptions


class ContextParallelOptions(PolicyOptions):
    """Settings of `context-parallel`."""

    partition: Literal["striped", "contiguous"] = "striped"
    """`striped` interleaves tokens, so that all instances compute the same; `contiguous` is the plain ring, whose last
    instance has nearly twice the mean of causal attention."""


def context_parallel(context: PolicyContext, options: ContextParallelOptions) -> FixedSp:
    """Return fixed-SP scheduling with one group of all prefill instances."""
    return FixedSp(context, FixedSpOptions(mode=options.mode, sp=0), options.partition, "context-parallel")
