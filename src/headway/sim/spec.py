"""Inputs of a simulation as objects: the instance and the run. `sim.build` compiles scenario files to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from headway.core.errors import ConfigError
from headway.perf.hardware.utilisation import UtilisationBase
from headway.perf.latency.base import LatencyModel
from headway.perf.latency.serving_overhead import NO_OVERHEAD, ServingOverhead
from headway.perf.latency.shard_exchange import ShardExchangeCost
from headway.policy.iteration.config import SchedulerConfig
from headway.sim.metrics import SloTargets
from headway.sim.noise import NoiseSpec
from headway.sim.pipeline import StageLink
from headway.sim.prefix_cache import PrefixCacheSpec
from headway.sim.vllm.spec import VllmSpec


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
    """Instances behind one queue; an arrival joins the one with the fewest unfinished requests."""
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
