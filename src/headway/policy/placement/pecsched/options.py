"""PecSched's settings, and what its two modes make of those that are not given."""

from __future__ import annotations

from typing import Literal

from headway.policy.placement.registry import PolicyOptions


class PecSchedOptions(PolicyOptions, frozen=True, kw_only=True):
    """long_tokens: prompts above this are long. batch_tokens: short prompts' tokens that an instance of a paused or
    co-located long request takes at a time (§5.2's threshold).

    long_replicas: the rule for "sufficient" replicas, which the paper does not state: as many as memory needs, as
    latency needs to stay within long_target_s, or long_sp. Never fewer than memory needs.

    queue: lengths in tokens (paper) or in predicted seconds (default), which know that attention is quadratic.
    ageing: a long prefill is suspended for at most so many times as long as it has computed, and slice_s more; then it
    computes until that holds again. "off" is the paper's; the default mode takes 1.

    preempt, disaggregate, colocate, fast_sp: without one of them this is the ablation /PE, /Dis, /CoL or /FSP (§6.4).
    """

    long_tokens: int = 32_768
    batch_tokens: int = 4096
    long_replicas: Literal["memory", "latency", "fixed"] = "latency"
    long_target_s: float = 20.0
    long_sp: int = 4
    queue: Literal["tokens", "seconds"] | None = None
    ageing: float | Literal["off"] | None = None
    slice_s: float = 1.0
    preempt: bool = True
    disaggregate: bool = True
    colocate: bool = True
    fast_sp: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.long_tokens, self.batch_tokens, self.long_sp) < 1:
            raise ValueError("`long_tokens`, `batch_tokens` and `long_sp` must be at least 1")
        if not (self.long_target_s > 0 and self.slice_s > 0):
            raise ValueError("`long_target_s` and `slice_s` must be above 0 seconds")
        if isinstance(self.ageing, float) and not self.ageing >= 0:
            raise ValueError("`ageing` must be at least 0, or off")

    @property
    def counts_seconds(self) -> bool:
        """Whether queues are measured in seconds."""
        return (self.queue or ("tokens" if self.mode == "paper" else "seconds")) == "seconds"

    @property
    def patience(self) -> float | None:
        """Seconds of suspension for a second of computing; None: without bound."""
        if self.ageing is None:
            return None if self.mode == "paper" else 1.0
        return None if self.ageing == "off" else self.ageing
