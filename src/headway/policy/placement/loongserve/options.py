"""LoongServe's settings."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from headway.core.file_sections import Count, CountOrZero, Positive
from headway.policy.placement.registry import PolicyOptions


class LoongServeOptions(PolicyOptions):
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
    round_s: Positive = 5.0
    """A request that would make a round longer is not added to it, unless it is the first."""
    round_tokens: Count = 500_000
    """Tokens of a round, likewise."""
    decode_step_s: Positive = 0.025
    """Assumed time of an output token."""
    wait_steps: Count = 10
    """Decode steps between two looks at the queue."""
    decode_batch: Count = 128
    """Requests of one instance above which a decode batch is compute-bound."""
    migrate: bool = True
    """Pack decode batches to free instances."""
    preempt: bool = True
    """Pause decode batches for prefills that gain more."""
    max_sp: CountOrZero = 0
    """Most instances of a prefill; 0: all."""
    reserved: CountOrZero = 0
    """Instances kept for prompts below `short_tokens`, with a scheduler of their own (Medha §6.5)."""
    short_tokens: Count = 8192
    """Prompts below this go to the reserved instances."""

    @model_validator(mode="after")
    def _reserved_has_batches(self) -> Self:
        if self.reserved and self.prefill == "greedy":
            raise ValueError("`reserved` needs `prefill` batched or single")
        return self
