"""A cluster whose engines were measured, as plain data: what `headway cluster --dry-run` and `headway simulate` of a
cluster file simulate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headway.perf.hardware.shapes import ModelShape
from headway.perf.hardware.utilisation import UtilisationBase
from headway.perf.latency.base import LatencyModel
from headway.perf.latency.groups import GroupLatency
from headway.perf.latency.serving_overhead import ServingOverhead
from headway.perf.latency.shard_exchange import ShardExchangeCost
from headway.perf.latency.sharded_decode import ShardedDecode
from headway.policy.iteration.config import SchedulerConfig
from headway.policy.placement.view import ClusterInstance, ClusterLinks
from headway.sim.build import hosted, serving_of
from headway.sim.cluster.spec import ClusterSpec
from headway.sim.memory import InfeasibleError
from headway.sim.prefix_cache import PrefixCacheSpec
from headway.sim.spec import InstanceSpec
from headway.sim.workload import TraceRequest


@dataclass(frozen=True)
class MeasuredEngine:
    """One engine, as it was loaded."""

    config: SchedulerConfig
    latency: LatencyModel
    """Of one pipeline stage, measured."""
    block_tokens: int
    max_model_len: int
    exchange: ShardExchangeCost
    """Between its KV groups."""
    prefix_cache: PrefixCacheSpec | None = None
    """None: it has none."""


@dataclass(frozen=True)
class MeasuredCluster:
    """A described cluster whose instances are not started. It can be sent to other processes."""

    instances: tuple[ClusterInstance, ...]
    engines: tuple[MeasuredEngine, ...]
    """By instance: that of its pool."""
    spans: GroupLatency
    """What the policy predicts spans with."""
    shape: ModelShape
    links: ClusterLinks
    backends: int
    """Pieces of KV that an instance receives at a time."""
    rows: int
    """See `ClusterSpec.rows`."""
    utilisation_base: UtilisationBase | None = None
    """Peaks of an instance in the mean over all; None: not known."""

    @property
    def longest(self) -> int:
        """Tokens of the longest request that all instances can serve, output included."""
        return min(engine.max_model_len for engine in self.engines)

    def check_lengths(self, requests: Sequence[TraceRequest]) -> None:
        """Raise InfeasibleError when a request is longer than the instances serve: a live cluster refuses it."""
        longest = max(request.prompt_tokens + request.output_tokens for request in requests)
        if longest > self.longest:
            raise InfeasibleError(
                f"the longest request has {longest:,} tokens, and the instances serve up to {self.longest:,} "
                "(max_model_len): set workload.max_prompt, or serve.max_model_len"
            )

    def spec(self) -> ClusterSpec:
        """Return the inputs of its simulation."""
        return ClusterSpec(
            instances=self.instances,
            engine=self._engine,
            spans=self.spans,
            shape=self.shape,
            serving=serving_of(self.engines[0].latency) or ServingOverhead(),
            links=self.links,
            backends=self.backends,
            # A live scheduler's prompt leaves when it is complete.
            sends_layers=False,
            rows=self.rows,
            pads_heads=False,
            copies_prefixes=False,
            utilisation_base=self.utilisation_base,
        )

    def _engine(self, group: Sequence[ClusterInstance]) -> InstanceSpec:
        head = self.engines[group[0].id]
        latency, serving = head.latency, serving_of(head.latency)
        if len(group) > 1:
            link = self.links.between(group[0], group[-1])
            # A group of several instances decodes with its KV spread over them, at the cost of their link.
            latency = ShardedDecode(latency, len(group), self.shape.layers, link, 1)
        return InstanceSpec(
            config=head.config,
            latency=latency,
            actual_latency=hosted(latency, serving),
            serving=serving or ServingOverhead(),
            # An instance's capacity is that of all its KV groups.
            kv_tokens=sum(each.capacity for each in group) // head.config.kv_parallel,
            block_tokens=head.block_tokens,
            exchange=head.exchange,
            prefix_cache=head.prefix_cache,
        )
