"""Inputs of a simulation as objects: the instance, its pipeline, the noise of iteration times, a simulated vLLM's
settings, and the run.

`sim.build` compiles scenario files to them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field, model_validator

from headway.core.errors import ConfigError
from headway.core.file_sections import Count, FileSection, Positive, Seconds, Seeds
from headway.perf.latency.base import LatencyModel
from headway.perf.latency.groups import ShardExchangeCost
from headway.perf.latency.table import NO_OVERHEAD, ServingOverhead, TimeSpread, spread_at
from headway.perf.utilisation import UtilisationBase
from headway.policy.hosted.settings import VllmSettings
from headway.policy.iteration.config import SchedulerConfig
from headway.sim.metrics import SloTargets
from headway.sim.prefix_cache import PrefixCacheSpec

# Times at which a batch enters and leaves each pipeline stage.
#
# All stages take equally long; activations cross a link between neighbours. A stage begins a batch as soon as it is
# free and the batch has arrived; the sender does not wait for the receiver (buffers are taken to suffice: batches in
# flight never outnumber stages).


@dataclass(frozen=True)
class StageLink:
    """Time to send activations from one stage to the next."""

    latency_s: float = 0.0
    """Seconds for each message."""
    row_s: float = 0.0
    """Seconds for each row (token) of activations."""


class StagePipeline:
    """A pipeline of `stages` stages, with the time at which each becomes free."""

    def __init__(self, stages: int, link: StageLink) -> None:
        self._free_s = [0.0] * stages
        self._link = link

    @property
    def free_s(self) -> float:
        """Virtual seconds at which stage 0 is, or became, free for another batch."""
        return self._free_s[0]

    def enter(self, now: float, stage_s: float, rows: int) -> list[tuple[float, float]]:
        """Enter a batch of `rows` tokens at `now`, which must not be before stage 0 is free.

        Return (start, end) of each stage, virtual seconds.
        """
        free = self._free_s
        # fast path for the usual case: no link, no list to build up
        if len(free) == 1:
            free[0] = now + stage_s
            return [(now, free[0])]
        cross_s = self._link.latency_s + rows * self._link.row_s
        spans = []
        at = now
        for stage, free_s in enumerate(free):
            start = max(at, free_s)
            end = start + stage_s
            free[stage] = end
            spans.append((start, end))
            at = end + cross_s
        return spans

    def lockstep(
        self, others: Sequence[StagePipeline], now: float, stage_s: float, rows: int
    ) -> list[tuple[float, float]]:
        """Enter a batch into this pipeline and `others` at once: each stage begins when it is free in all of them.

        Return (start, end) of each stage, virtual seconds.
        """
        all_free = [self._free_s, *(other._free_s for other in others)]
        cross_s = self._link.latency_s + rows * self._link.row_s
        spans = []
        at = now
        for stage in range(len(self._free_s)):
            start = max(at, *(free[stage] for free in all_free))
            end = start + stage_s
            for free in all_free:
                free[stage] = end
            spans.append((start, end))
            at = end + cross_s
        return spans

    def end_s(self, now: float, stage_s: float, rows: int) -> float:
        """Return the time at which a batch entering at `now` leaves the last stage, if all stages are free."""
        cross_s = self._link.latency_s + rows * self._link.row_s
        end = now + stage_s
        for _ in self._free_s[1:]:
            end = end + cross_s + stage_s
        return end

    def cut(self, end_s: float) -> None:
        """Free the only stage at `end_s`, earlier than `enter` returned, when repeated decodes are cut short."""
        self._free_s[0] = end_s

    def reset(self, now: float) -> None:
        """Drop the batches in all stages: every stage is free from `now` on."""
        self._free_s = [now] * len(self._free_s)


class NoiseSpec(FileSection):
    """The law of the noise: an iteration takes predicted × bias × a random factor of mean 1."""

    kind: Literal["none", "lognormal", "uniform"] = "none"
    amount: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.0, description="standard deviation of ln, or half width"
    )
    bias: Positive = Field(default=1.0, description="iterations take so many times what was predicted")
    measured: bool = Field(
        default=True, description="iterations vary as those of the server that a measured table was corrected by"
    )


class NoiseSource:
    """The sequence of factors of one replica, one for each iteration."""

    def __init__(self, noise: NoiseSpec, seed: str, spread: Sequence[TimeSpread] = ()) -> None:
        """spread: of the table that predicts iterations, drawn from in addition to `noise`."""
        self._noise = noise
        self._seed = seed
        self._random = random.Random(seed)
        self._kept: float | None = None
        self._spread = spread if noise.measured else ()
        self.exact = noise.bias == 1.0 and (noise.kind == "none" or noise.amount == 0.0) and not self._spread

    def fork(self, name: str) -> NoiseSource:
        """Return an independent source, seeded by this source's seed and `name`."""
        return NoiseSource(self._noise, f"{self._seed} {name}", self._spread)

    def factor(self, predicted_s: float) -> float:
        """Return the factor of the next iteration. predicted_s: its time without noise."""
        if self._kept is not None:
            kept, self._kept = self._kept, None
            return kept
        if self._spread:
            return self._drawn() * spread_at(self._spread, predicted_s).factor(self._random.random(), predicted_s)
        return self._drawn()

    def _drawn(self) -> float:
        noise = self._noise
        if noise.kind == "lognormal":
            # E[exp(N(-σ²/2, σ))] = 1, so the mean stays `bias`
            return noise.bias * math.exp(self._random.gauss(-0.5 * noise.amount**2, noise.amount))
        if noise.kind == "uniform":
            return noise.bias * self._random.uniform(1.0 - noise.amount, 1.0 + noise.amount)
        return noise.bias

    def keep(self, factor: float) -> None:
        """Put back a factor whose iteration was not started; the next call of `factor` returns it."""
        self._kept = factor


def stock_flags(scheduler: str) -> tuple[bool, int]:
    """Return (by priority, threshold) of `default`, `priority`, `threshold:N` and `plugged`. Raises ConfigError."""
    name, colon, tokens = scheduler.partition(":")
    if name == "threshold" and colon and tokens.isdecimal() and int(tokens) > 0:
        return False, int(tokens)
    if scheduler in ("default", "plugged", "priority"):
        return scheduler == "priority", 0
    raise ConfigError(f"{scheduler!r} is none of default, priority, plugged and threshold:N, such as threshold:512")


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


class VllmSpec(VllmSection):
    """A simulated vLLM: its settings, with the blocks of its KV cache."""

    num_blocks: int
    """KV blocks, the null block included (`num_gpu_blocks`)."""
    by_priority: bool = False
    """`--scheduling-policy priority`."""
    long_prefill_token_threshold: int = 0
    plugged: SchedulerConfig | None = None
    """Headway's policy inside (`VllmSettings.scheduler_config`); None: vLLM's stock scheduler."""

    @model_validator(mode="after")
    def _room_for_requests(self) -> VllmSpec:
        if self.num_blocks < 2:
            raise ConfigError(
                f"the KV cache holds {self.num_blocks} blocks of {self.block_size} tokens, of which vLLM keeps one for "
                "itself: raise memory.kv_tokens or memory.utilisation"
            )
        return self

    @property
    def usable_blocks(self) -> int:
        """Blocks that requests can take: all but the null block."""
        return self.num_blocks - 1

    @property
    def longest_request(self) -> int:
        """Most tokens of one request, prompt and output."""
        held = self.usable_blocks * self.block_size
        return held if self.max_model_len is None else min(held, self.max_model_len)


@dataclass(frozen=True, kw_only=True)
class InstanceSpec:
    """One instance: scheduler settings, latency model and KV capacity."""

    config: SchedulerConfig
    latency: LatencyModel
    """Predicts the time of one pipeline stage."""
    kv_tokens: int
    """KV capacity of each of its `config.kv_parallel` groups."""
    block_tokens: int = 64
    link: StageLink = field(default_factory=StageLink)
    exchange: ShardExchangeCost = ShardExchangeCost()  # noqa: RUF009 - frozen
    """Cost of the exchange between KV groups that share a request."""
    actual_latency: LatencyModel | None = None
    """Times that iterations really take; None: those that `latency` predicts."""
    serving: ServingOverhead = NO_OVERHEAD
    """What a server adds to TTFT and E2E, and to iterations after an idle engine; the engine's own time between
    iterations is in `actual_latency`."""
    learns: bool = False
    """Whether predictions are corrected from the times of past iterations, as in the live engine."""
    utilisation_base: UtilisationBase | None = None
    prefix_cache: PrefixCacheSpec | None = None
    """None: no KV of ended requests is kept."""
    vllm: VllmSpec | None = None
    """Settings of vLLM, if the engine is vLLM and not Headway's own; `config` then serves memory planning only."""


class RunSection(FileSection):
    window_s: Seconds | None = Field(default=None, description="observe for so long; null: until the last request ends")
    seeds: Seeds = Field(default=(0,), description="one run each; several give confidence intervals")
    noise: NoiseSpec = NoiseSpec()
    timeout_s: Seconds | None = Field(default=None, description="clients leave so long after arrival")
    patience_s: Seconds | None = Field(default=None, description="clients leave after an exponential time of this mean")
    max_output: Count | None = Field(
        default=None, description="max_tokens that clients send if their answer is not longer; null: its length"
    )
    send_slo: bool = Field(
        default=True, description="requests carry their SLOs to the scheduler; else its own deadlines apply"
    )
    refuse_late: bool = Field(default=False, description="refuse arrivals that are predicted to miss their ttft_s")
    deadline_is_target: bool = Field(
        default=False, description="judge TTFT by the scheduler's deadline where there is no SLO"
    )
    fast_forward: bool = Field(
        default=True, description="take stretches of pure decoding in one step: same results, sooner"
    )


class RunSpec(RunSection):
    """Settings of a run of one seed. Times in seconds."""

    replicas: int = 1
    """Number of equal instances; an arrival joins the one with the fewest unfinished requests."""
    seed: int = 0
    targets: Mapping[str, SloTargets] = Field(default_factory=dict)
    """Objectives of the requests of each class."""
    keep_iterations: bool = False
    """Keep one row an iteration, for traces and plots."""

    @model_validator(mode="after")
    def _possible(self) -> RunSpec:
        if self.replicas < 1:
            raise ConfigError(f"replicas must be at least 1, not {self.replicas}")
        if self.refuse_late and not (self.send_slo and any(slo.ttft_s for slo in self.targets.values())):
            raise ConfigError("refuse_late needs a class with a ttft_s in its SLO, and send_slo")
        return self
