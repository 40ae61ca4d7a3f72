"""What is simulated, as objects: one instance, and how it is run. (Scenario files are compiled to these.)"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from headway.core.errors import ConfigError
from headway.perf.hardware.shapes import ModelShape
from headway.perf.latency.base import LatencyModel
from headway.perf.latency.shard_exchange import ShardExchangeCost
from headway.policy.iteration.config import SchedulerConfig
from headway.sim.metrics import SloTargets
from headway.sim.noise import NoiseSpec
from headway.sim.pipeline import StageLink


@dataclass(frozen=True, kw_only=True)
class UtilisationBase:
    """What utilisation is measured against: all devices of one instance together.

    MFU: model FLOPs (matrix products and causal attention) over peak. MBU: bytes of weights (once an iteration) and of
    KV that decodes and chunks read, over peak.
    """

    shape: ModelShape
    peak_flops: float
    peak_bandwidth: float


@dataclass(frozen=True, kw_only=True)
class InstanceSpec:
    """One instance. `latency` predicts one pipeline stage's time; `truth`, where given, is what really happens.
    `kv_tokens`: of each of its `config.kv_parallel` groups; `exchange`: what it costs that they share a request.

    `learns`: the scheduler's predictions correct themselves from what iterations took, as the live engine's do.
    """

    config: SchedulerConfig
    latency: LatencyModel
    kv_tokens: int
    block_tokens: int = 64
    link: StageLink = field(default_factory=StageLink)
    exchange: ShardExchangeCost = ShardExchangeCost()  # noqa: RUF009 - frozen
    truth: LatencyModel | None = None
    learns: bool = False
    yardstick: UtilisationBase | None = None


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """How a run goes. Times in seconds.

    replicas: instances behind one queue; an arrival joins the one with the fewest unfinished requests.
    targets: what a class is judged by; told: whether the scheduler hears of the targets (else its own deadlines apply).
    deadline_is_target: classes without a TTFT target are judged by the deadline that the scheduler gave them.
    max_output: what clients say they want at most; None: exactly what they will get.
    window_s: the run is observed for so long; None: to the last request's end.
    timeout_s: clients leave so long after arrival; patience_s: or at a random (exponential) time of this mean.
    fast_forward: take stretches of pure decoding in one step. Same results, sooner.
    keep_iterations: keep one row an iteration (for traces and plots).
    """

    replicas: int = 1
    seed: int = 0
    targets: Mapping[str, SloTargets] = field(default_factory=dict)
    told: bool = True
    deadline_is_target: bool = False
    max_output: int | None = None
    noise: NoiseSpec = field(default_factory=NoiseSpec)
    window_s: float | None = None
    timeout_s: float | None = None
    patience_s: float | None = None
    fast_forward: bool = True
    keep_iterations: bool = False

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ConfigError(f"replicas must be at least 1, not {self.replicas}")
        for name in ("window_s", "timeout_s", "patience_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} must be above 0 seconds, not {value}")
