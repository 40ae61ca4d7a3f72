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
    """instances: as they start. engine: what the scheduler of an instance, or of a group that works as one, runs on.

    spans: what a span takes (noise comes on top); policies may be given another model. backends: receive backends of an
    instance. rows: most rows of a span that an instance computes at once (0: all), which says where it can be paused
    (`perf.latency.pause_points`). balance: whether redistributing earlier chunks' KV over a larger group costs what
    does not
    overlap with computing (Tetris §4.1).
    """

    instances: tuple[ClusterInstance, ...]
    engine: Callable[[Sequence[ClusterInstance]], InstanceSpec]
    spans: GroupLatency
    shape: ModelShape
    links: ClusterLinks
    backends: int = 16
    rows: int = 0
    handshake: str = "handshake"
    balance: bool = True

    @property
    def policy_context(self) -> PolicyContext:
        """What a policy is told, unless it is to be wrong: what the simulator itself goes by."""
        return PolicyContext(latency=self.spans, shape=self.shape, rows=self.rows)

    def __post_init__(self) -> None:
        if not self.instances:
            raise ConfigError("a cluster needs at least one instance")
        if self.backends < 1:
            raise ConfigError(f"backends must be at least 1, not {self.backends}")
