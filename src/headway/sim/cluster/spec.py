"""`ClusterSpec`: the inputs of a cluster simulation as objects, compiled from a scenario file by `build`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headway.core.errors import ConfigError
from headway.perf.hardware.shapes import ModelShape
from headway.perf.hardware.utilisation import UtilisationBase
from headway.perf.latency.groups import GroupLatency
from headway.perf.latency.serving_overhead import ServingOverhead
from headway.policy.placement.registry import PolicyContext
from headway.policy.placement.view import ClusterInstance, ClusterLinks
from headway.sim.spec import InstanceSpec


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """The cluster at the start of a simulation."""

    instances: tuple[ClusterInstance, ...]
    """In order of id."""
    engine: Callable[[Sequence[ClusterInstance]], InstanceSpec]
    """Returns the specification of the engine on an instance, or on a group that works as one."""
    spans: GroupLatency
    """Predicts the time of a span; noise comes on top. Policies may be given another model."""
    shape: ModelShape
    """The model that all instances serve."""
    serving: ServingOverhead = field(default_factory=ServingOverhead)
    """What a server adds to requests and spans."""
    links: ClusterLinks
    """Network links inside a node and between nodes."""
    backends: int = 16
    """KV transfers that an instance receives at the same time."""
    sends_layers: bool = True
    """Whether KV slices that are `overlapped` have sent all layers but the last while they were computed."""
    rows: int = 0
    """Most rows of a span that an instance computes at once (0: all): where it can be paused, see
    `perf.latency.pause_points`."""
    handshake: str = "handshake"
    """Order in which transfers are admitted at a receiver."""
    utilisation_base: UtilisationBase | None = None
    """Of an instance, in the mean over all; None: no utilisation is told."""
    balance: bool = True
    """Whether spreading earlier KV over a larger group costs what does not overlap with compute (Tetris §4.1)."""

    kv_reservations: bool = True
    """Whether KV outside of schedulers takes blocks too, and spans and transfers wait for them as in live clusters."""
    pads_heads: bool = True
    """See `PolicyContext.pads_heads`."""
    copies_prefixes: bool = True
    """See `PolicyContext.copies_prefixes`."""

    @property
    def policy_context(self) -> PolicyContext:
        """The context of placement policies: they predict spans with the simulator's own model."""
        return PolicyContext(
            latency=self.spans,
            shape=self.shape,
            rows=self.rows,
            pads_heads=self.pads_heads,
            copies_prefixes=self.copies_prefixes,
        )

    def __post_init__(self) -> None:
        if not self.instances:
            raise ConfigError("a cluster needs at least one instance")
        if self.backends < 1:
            raise ConfigError(f"backends must be at least 1, not {self.backends}")
