"""PecSched's settings, and their defaults in its two modes."""

from __future__ import annotations

from typing import Literal

from headway.core.file_sections import Count, Positive, PositiveOrZero
from headway.policy.placement.prefix_reuse import AffinityOptions


class PecSchedOptions(AffinityOptions):
    """Settings of `pecsched`."""

    long_tokens: Count = 32_768
    """Prompts above this are long."""
    batch_tokens: Count = 4096
    """Tokens of short prompts that a replica of a paused or co-located long request takes at a time (§5.2's threshold).
    """
    colocated_tokens: Count | None = None
    """Largest prompt that is prefilled beside a long decode, whose token waits for it; longer ones pause a long prefill
    or wait for a replica. None: any prompt."""
    long_replicas: Literal["memory", "latency", "fixed"] = "latency"
    """Rule for "sufficient" replicas, which the paper does not state: as memory needs, as latency needs to stay within
    `long_target_s`, or `long_sp`. Never fewer than memory needs."""
    long_target_s: Positive = 20.0
    """Largest predicted prefill time of a long request, in seconds, for the rule `latency`."""
    long_sp: Count = 4
    """Replicas of a long request for the rule `fixed`."""
    queue: Literal["tokens", "seconds"] | None = None
    """Unit of queue lengths; None: tokens in mode `paper`, else predicted seconds, in which attention is quadratic."""
    ageing: PositiveOrZero | Literal["off"] | None = None
    """A long prefill is suspended for at most so many times as long as it has computed, and `slice_s` more; then it
    computes until that holds again. "off": without bound. None: off in mode `paper`, else 1."""
    slice_s: Positive = 1.0
    """Seconds added to the time computed when ageing bounds a suspension: see `ageing`."""
    preempt: bool = True
    """False: the ablation /PE (§6.4)."""
    disaggregate: bool = True
    """False: the ablation /Dis: short requests decode where they were prefilled."""
    colocate: bool = True
    """False: the ablation /CoL: long decodes are preempted instead of co-located."""
    fast_sp: bool = True
    """False: the ablation /FSP: plain ring attention."""

    @property
    def counts_seconds(self) -> bool:
        """Whether queues are measured in seconds."""
        return (self.queue or ("tokens" if self.mode == "paper" else "seconds")) == "seconds"

    @property
    def ageing_factor(self) -> float | None:
        """Seconds of suspension allowed for each second of computing; None: without bound."""
        if self.ageing is None:
            return None if self.mode == "paper" else 1.0
        return None if self.ageing == "off" else self.ageing
