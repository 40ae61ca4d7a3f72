"""The section `vllm` of a scenario file."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from headway.core.errors import ConfigError
from headway.core.file_sections import Count, FileSection
from headway.policy.hosted.settings import VllmSettings
from headway.sim.spec import stock_flags


class VllmSection(FileSection):
    """Settings of `engine: vllm`, by their names on vLLM's command line where it has them."""

    scheduler: str = Field(
        default="default",
        description="default, threshold:N (`--long-prefill-token-threshold N`), priority (`--scheduling-policy "
        "priority`), or plugged (`--scheduler-cls headway.vllm.Scheduler`)",
    )
    headway: VllmSettings = Field(
        default_factory=lambda: VllmSettings.model_validate({}),
        description="with plugged: what `--additional-config '{\"headway\": {…}}'` holds (docs/how-to/vllm.md)",
    )
    priorities: dict[str, int] = Field(default_factory=dict, description="by class; lower goes first, as in vLLM")
    block_size: Count = Field(default=16, description="tokens a KV block")
    max_num_batched_tokens: Count = Field(default=8192, description="tokens of one step")
    max_num_seqs: Count = Field(default=256, description="running requests")
    max_model_len: Count | None = Field(default=None, description="longest request; null: what the KV cache holds")
    async_scheduling: bool = Field(default=True, description="a step is scheduled while the one before is computed")
    enable_prefix_caching: bool = Field(
        default=True, description="a preempted request finds its KV again where it has not been overwritten"
    )
    long_prefill_token_threshold_adaptive: bool = Field(
        default=False, description="the threshold is at least a request's even share of a step"
    )
    scheduler_reserve_full_isl: bool = Field(default=True, description="a request begins only if all of it fits")
    watermark: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.0, description="share of the blocks that a request which begins leaves free"
    )
    prefill_schedule_interval: Count = Field(
        default=1, description="steps from one with prefills to the next, while requests decode (vLLM 0.33)"
    )

    @model_validator(mode="after")
    def _known_scheduler(self) -> VllmSection:
        try:
            stock_flags(self.scheduler)
        except ConfigError as error:
            raise ValueError(f"`scheduler`: {error}") from None
        if self.scheduler == "plugged" and self.prefill_schedule_interval > 1:
            raise ValueError("`prefill_schedule_interval`: Headway decides in every step which prefills get tokens")
        if self.headway.profile is not None:
            raise ValueError("`headway.profile`: step times come from the scenario's `latency`")
        if self.headway.log is not None:
            raise ValueError("`headway.log`: a simulation writes no decision log; `--trace` shows its steps")
        return self
