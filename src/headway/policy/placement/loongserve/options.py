"""LoongServe's settings."""

from __future__ import annotations

from typing import Literal

from headway.policy.placement.registry import PolicyOptions


class LoongServeOptions(PolicyOptions, frozen=True, kw_only=True):
    """Settings of `loongserve`. Without decode instances in the cluster, requests decode where they were prefilled
    (§4). The defaults of `round_s` to `decode_batch` are the published artifact's.

    mode `paper` fills a round only with instances whose batch has ended as a whole, and keeps room for the prompt's own
    KV when it scales down, as the published code does; `default` also fills instances that scale-down frees, and keeps
    room for the output.
    """

    prefill: Literal["batched", "single", "greedy"] = "batched"
    """`batched`: by dynamic programming (§5.3); `single`: the same with one request in a batch; `greedy`: as Tetris
    §2.4 describes it, each request on arrival, on the group that ends it first, queues included (needs decode
    instances)."""
    round_s: float = 5.0
    """A request that would make a round longer is not added to it, unless it is the first."""
    round_tokens: int = 500_000
    """Tokens of a round, likewise."""
    decode_step_s: float = 0.025
    """Assumed time of an output token."""
    wait_steps: int = 10
    """Decode steps between two looks at the queue."""
    decode_batch: int = 128
    """Requests of one instance above which a decode batch is compute-bound."""
    migrate: bool = True
    """Pack decode batches to free instances."""
    preempt: bool = True
    """Pause decode batches for prefills that gain more."""
    max_sp: int = 0
    """Most instances of a prefill; 0: all."""
    reserved: int = 0
    """Instances kept for prompts below `short_tokens`, with a scheduler of their own (Medha §6.5)."""
    short_tokens: int = 8192
    """Prompts below this go to the reserved instances."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("round_s", "decode_step_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"`{name}` must be above 0")
        for name in ("round_tokens", "wait_steps", "decode_batch", "short_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1")
        for name in ("max_sp", "reserved"):
            if getattr(self, name) < 0:
                raise ValueError(f"`{name}` must be at least 0")
        if self.reserved and self.prefill == "greedy":
            raise ValueError("`reserved` needs `prefill` batched or single")
