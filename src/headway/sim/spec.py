"""Inputs of a simulation as objects: the instance, its pipeline, the noise of iteration times, a simulated vLLM's
settings, and the run.

`sim.build` compiles scenario files to them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from headway.core.errors import ConfigError
from headway.perf.latency.base import LatencyModel
from headway.perf.latency.groups import ShardExchangeCost
from headway.perf.latency.table import NO_OVERHEAD, ServingOverhead, TimeSpread, spread_at
from headway.perf.utilisation import UtilisationBase
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


@dataclass(frozen=True)
class NoiseSpec:
    """The law of the noise: an iteration takes predicted × bias × a random factor of mean 1."""

    kind: Literal["none", "lognormal", "uniform"] = "none"
    amount: float = 0.0
    """lognormal: standard deviation of ln(factor). uniform: the factor lies in [1 - amount, 1 + amount]."""
    bias: float = 1.0
    """Constant factor on every iteration; above 1, iterations take longer than predicted."""
    measured: bool = True
    """Whether iterations vary as those did that a table was measured with (`ServingOverhead.spread`)."""


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


@dataclass(frozen=True, kw_only=True)
class VllmSpec:
    """vLLM's own settings, by the names of its command line. Raises ConfigError on an impossible value."""

    num_blocks: int
    """KV blocks, the null block included (`num_gpu_blocks`)."""
    block_size: int = 16
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 256
    max_model_len: int | None = None
    """Longest request, tokens; None: as many as the blocks hold."""
    by_priority: bool = False
    """`--scheduling-policy priority`."""
    long_prefill_token_threshold: int = 0
    long_prefill_token_threshold_adaptive: bool = False
    async_scheduling: bool = True
    enable_prefix_caching: bool = True
    scheduler_reserve_full_isl: bool = True
    """A request begins only if the whole of its known tokens fits in the free blocks."""
    watermark: float = 0.0
    """Share of the blocks that a request which begins must leave free."""
    prefill_schedule_interval: int = 1
    """Steps from one with prefills to the next, while requests decode and none waited longer (vLLM 0.33)."""
    plugged: SchedulerConfig | None = None
    """Headway's policy inside (`VllmSettings.scheduler_config`); None: vLLM's stock scheduler."""
    priorities: Mapping[str, int] = field(default_factory=dict)
    """Priority of the requests of a class; lower goes first, 0 without an entry."""

    def __post_init__(self) -> None:
        if self.num_blocks < 2:
            raise ConfigError(
                f"the KV cache holds {self.num_blocks} blocks of {self.block_size} tokens, of which vLLM keeps one for "
                "itself: raise memory.kv_tokens or memory.utilisation"
            )

    @property
    def usable_blocks(self) -> int:
        """Blocks that requests can take: all but the null block."""
        return self.num_blocks - 1

    @property
    def longest_request(self) -> int:
        """Most tokens of one request, prompt and output."""
        held = self.usable_blocks * self.block_size
        return held if self.max_model_len is None else min(held, self.max_model_len)


def stock_flags(scheduler: str) -> tuple[bool, int]:
    """Return (by priority, threshold) of `default`, `priority`, `threshold:N` and `plugged`. Raises ConfigError."""
    name, colon, tokens = scheduler.partition(":")
    if name == "threshold" and colon and tokens.isdecimal() and int(tokens) > 0:
        return False, int(tokens)
    if scheduler in ("default", "plugged", "priority"):
        return scheduler == "priority", 0
    raise ConfigError(f"{scheduler!r} is none of default, priority, plugged and threshold:N, such as threshold:512")


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


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """Settings of a run. Times in seconds."""

    replicas: int = 1
    """Number of equal instances; an arrival joins the one with the fewest unfinished requests."""
    seed: int = 0
    targets: Mapping[str, SloTargets] = field(default_factory=dict)
    """Objectives of the requests of each class."""
    send_slo: bool = True
    """Whether requests carry the targets to the scheduler; otherwise its own deadlines apply."""
    refuse_late: bool = False
    """Whether requests that carry a TTFT target ask to be refused if they are predicted to miss it."""
    deadline_is_target: bool = False
    """Whether classes without a TTFT target are measured against the deadline that the scheduler assigned."""
    max_output: int | None = None
    """Output limit of every request, of which the scheduler knows; None: exactly the output that it will have."""
    noise: NoiseSpec = field(default_factory=NoiseSpec)
    window_s: float | None = None
    """Observed time; None: to the end of the last request."""
    timeout_s: float | None = None
    """Time after arrival at which clients leave."""
    patience_s: float | None = None
    """Mean of the exponential time after which clients leave."""
    fast_forward: bool = True
    """Take stretches of pure decoding in one step: same results, sooner."""
    keep_iterations: bool = False
    """Keep one row an iteration, for traces and plots."""

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ConfigError(f"replicas must be at least 1, not {self.replicas}")
        if self.refuse_late and not (self.send_slo and any(slo.ttft_s for slo in self.targets.values())):
            raise ConfigError("refuse_late needs a class with a ttft_s in its SLO, and send_slo")
        for name in ("window_s", "timeout_s", "patience_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} must be above 0 seconds, not {value}")
