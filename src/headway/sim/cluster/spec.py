"""What a cluster simulation depends on, as objects. (Scenario files are compiled to these.)"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headway.core.errors import ConfigError
from headway.perf.hardware.shapes import ModelShape
from headway.perf.latency.groups import GroupLatency
from headway.policy.placement.registry import PolicyContext
from headway.policy.placement.view import ClusterInstance, ClusterLinks
from headway.sim.spec import InstanceSpec


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """A cluster as it starts."""

    instances: tuple[ClusterInstance, ...]
    engine: Callable[[Sequence[ClusterInstance]], InstanceSpec]
    """Returns what the scheduler of an instance, or of a group that works as one, runs on."""
    spans: GroupLatency
    """Predicts the time of a span; noise comes on top. Policies may be given another model."""
    shape: ModelShape
    links: ClusterLinks
    backends: int = 16
    """KV transfers that an instance receives at a time."""
    rows: int = 0
    """Most rows of a span that an instance computes at once (0: all): where it can be paused, see
    `perf.latency.pause_points`."""
    handshake: str = "handshake"
    """How transfers take turns at a receiver."""
    balance: bool = True
    """Whether spreading earlier KV over a larger group costs what does not overlap with compute (Tetris §4.1)."""

    @property
    def policy_context(self) -> PolicyContext:
        """What policies predict by, unless they are given another: the simulator's own model."""
        return PolicyContext(latency=self.spans, shape=self.shape, rows=self.rows)

    def __post_init__(self) -> None:
        if not self.instances:
            raise ConfigError("a cluster needs at least one instance")
        if self.backends < 1:
            raise ConfigError(f"backends must be at least 1, not {self.backends}")
