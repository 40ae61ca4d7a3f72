"""LoongServe's settings."""

from __future__ import annotations

from typing import Literal

from headway.policy.placement.registry import PolicyOptions


class LoongServeOptions(PolicyOptions, frozen=True, kw_only=True):
    """prefill: `batched` by dynamic programming (§5.3), `single` the same with one request a batch, `greedy` as Tetris
    §2.4 describes it: each request when it arrives, on the group that ends it first, queues included (needs decode
    instances). Without decode instances in the cluster, requests decode where they were prefilled (§4).

    round_s, round_tokens: no request is added to a round that would take longer, or hold more tokens, but for the
    first; decode_step_s: what an output token is taken to take; wait_steps: decode steps between two looks at the
    queue; decode_batch: requests an instance above which a decode batch is bound by computing. These are the values of
    the published artifact. migrate: whether decode batches are packed to free instances; preempt: whether they are
    paused for prefills that gain more. max_sp: most instances of a prefill (0: all). reserved, short_tokens: instances
    that are kept for prompts below a length, behind a scheduler of their own (Medha §6.5).

    mode `paper` fills the gaps of a round only with instances whose batch has ended wholly, and keeps to a prompt's
    own KV when it scales down, as the published code; `default` also fills with those that scale-down frees, and keeps
    room for the output.
    """

    prefill: Literal["batched", "single", "greedy"] = "batched"
    round_s: float = 5.0
    round_tokens: int = 500_000
    decode_step_s: float = 0.025
    wait_steps: int = 10
    decode_batch: int = 128
    migrate: bool = True
    preempt: bool = True
    max_sp: int = 0
    reserved: int = 0
    short_tokens: int = 8192

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
