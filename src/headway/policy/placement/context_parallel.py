"""Unchunked context parallelism: every prompt over all prefill instances as one ring, one after another.

`partition: striped` interleaves tokens, so that all instances compute the same; `contiguous` is the plain ring, whose
last instance has nearly twice the mean of causal attention. Nothing is cut and nothing is preempted: a long prompt
holds the whole pool (the baseline of Medha Fig. 5b and Mnemosyne Fig. 14, at cluster level).
"""

from __future__ import annotations

from typing import Literal

from headway.policy.placement import fixed_sp
from headway.policy.placement.fixed_sp import FixedSp
from headway.policy.placement.registry import PolicyContext, PolicyOptions


class ContextParallelOptions(PolicyOptions, frozen=True, kw_only=True):
    """See the module."""

    partition: Literal["striped", "contiguous"] = "striped"


def context_parallel(surroundings: PolicyContext, options: ContextParallelOptions) -> FixedSp:
    """A fixed group of everything."""
    attn: Literal["striped", "ring"] = "striped" if options.partition == "striped" else "ring"
    return FixedSp(surroundings, fixed_sp.FixedSpOptions(mode=options.mode, sp=0), attn, "context-parallel")
