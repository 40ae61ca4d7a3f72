"""The result of a simulated run: request records, counters of each replica, and iterations if they were kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from headway.core.batch import Batch
from headway.perf.hardware.utilisation import UtilisationBase
from headway.sim.metrics import RequestRecord, RunSummary, summarise
from headway.sim.metrics.quantiles import PERCENTILES
from headway.sim.prefix_cache import PrefixCacheUse


class IterationRecord(NamedTuple):
    """One executed batch, for traces and plots."""

    replica: int
    batch: int
    stages: tuple[tuple[float, float], ...]
    """(start, end) seconds in each pipeline stage, of its first repetition."""
    done_s: float
    """Virtual seconds at which its last repetition left the last stage."""
    decodes: int
    """Decodes of all groups together, in one repetition."""
    decode_kv: int
    """KV tokens that the decodes of all groups read."""
    chunks: tuple[tuple[str, int, int], ...]
    """(request, first token, tokens)."""
    predicted_s: float
    """The scheduler's prediction for one stage."""
    repeats: int
    """Iterations that the batch stands for."""
    groups: tuple[int, ...] = (0,)
    """The KV groups that had a part in it."""

    @classmethod
    def of(
        cls, replica: int, batch: Batch, stages: Sequence[tuple[float, float]], done_s: float, repeats: int
    ) -> IterationRecord:
        """Return the record of a batch."""
        parts = batch.parts
        chunks = tuple((chunk.request, chunk.start, chunk.tokens) for part in parts for chunk in part.prefills)
        decodes, kv = sum(part.decodes.count for part in parts), sum(part.decodes.kv_sum for part in parts)
        groups = tuple(part.group for part in parts)
        return cls(replica, batch.id, tuple(stages), done_s, decodes, kv, chunks, batch.predicted_s, repeats, groups)


class GroupJoin(NamedTuple):
    """A KV group joins a request, when the shards of the groups before it are full."""

    at_s: float
    replica: int
    request: str
    group: int
    start: int
    """First token whose KV the group holds and computes."""
    groups: int
    """Groups that hold KV of the request from then on, this one included."""


@dataclass(frozen=True)
class ReplicaUse:
    """Counters of one replica. Tokens count rows of forward passes, recomputed ones included."""

    iterations: int
    """Iterations, each repetition of decodes counted."""
    batches: int
    """Decisions of the scheduler; fewer than iterations where decodes were repeated."""
    busy_s: float
    """Seconds that stage 0 computed, the mean over KV groups."""
    prefill_tokens: int
    decode_tokens: int
    kv_read_tokens: int
    """KV tokens that attention read, for decodes and chunks."""
    attention_pairs: float
    """Pairs of a query token and a KV token, counted causally; for FLOPs."""
    preemptions: int
    recomputed_tokens: int
    kv_peak_tokens: int
    """Most KV tokens in use at a time, of all KV groups together."""
    scheduling_s: float = 0.0
    """Real seconds spent in the scheduler; 0 without a stopwatch."""
    more_passes: int = 0
    """Forward passes of KV groups beyond the first in an iteration; each reads the weights again."""
    joins: tuple[GroupJoin, ...] = ()
    """KV groups that joined a long request."""
    prefix_cache: PrefixCacheUse | None = None
    """None: it had none."""


@dataclass
class SpanWork:
    """Work of a cluster's spans, which no scheduler counts, over all instances; parts of a span count as parts."""

    tokens: float = 0.0
    """Rows of forward passes."""
    attention_pairs: float = 0.0
    kv_read_tokens: float = 0.0
    passes: float = 0.0
    """Forward passes, each of which reads an instance's weights."""


@dataclass(frozen=True)
class SimResult:
    """One simulated run. Every request has a record: those that the window cut off have the error "unfinished"."""

    records: tuple[RequestRecord, ...]
    replicas: tuple[ReplicaUse, ...]
    duration_s: float
    """The window, or the time from the first arrival to the last end."""
    iterations: tuple[IterationRecord, ...] = ()
    utilisation_base: UtilisationBase | None = None
    spans: SpanWork = field(default_factory=SpanWork)
    stages: int = 1
    groups: int = 1

    @cached_property
    def _summary(self) -> RunSummary:
        return summarise(self.records, duration_s=self.duration_s, percents=PERCENTILES)

    def summary(self) -> RunSummary:
        """Return counts and latencies by class and in all; latencies are over requests that finished."""
        return self._summary

    @property
    def unfinished(self) -> int:
        return sum(record.error == "unfinished" for record in self.records)

    @property
    def starved(self) -> int:
        """Requests that were never scheduled, without rejected ones."""
        return sum(r.scheduled_s is None and not r.rejected for r in self.records)

    @property
    def idle_share(self) -> float:
        """Share of the run in which stage 0 computed nothing, over all replicas."""
        whole = self.duration_s * len(self.replicas)
        return max(0.0, 1.0 - sum(use.busy_s for use in self.replicas) / whole) if whole > 0 else 0.0

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation over the whole run, all devices; None without a utilisation_base."""
        # model FLOPs: recomputed tokens count as well, since they were computed
        if self.utilisation_base is None or not self.duration_s:
            return None
        flops = self.utilisation_base.flops(self.spans.tokens, self.spans.attention_pairs)
        flops += sum(
            self.utilisation_base.flops(use.prefill_tokens + use.decode_tokens, use.attention_pairs)
            for use in self.replicas
        )
        return flops / (self.duration_s * self.utilisation_base.peak_flops * len(self.replicas))

    @property
    def mbu(self) -> float | None:
        """Memory bandwidth utilisation over the whole run, all devices; None without a utilisation_base."""
        if self.utilisation_base is None or not self.duration_s:
            return None
        # every forward pass reads all weights once
        passes = self.spans.passes + sum(use.iterations + use.more_passes for use in self.replicas)
        kv_tokens = self.spans.kv_read_tokens + sum(use.kv_read_tokens for use in self.replicas)
        read = self.utilisation_base.bytes_read(round(passes), round(kv_tokens))
        return read / (self.duration_s * self.utilisation_base.peak_bandwidth * len(self.replicas))

    def use_json(self) -> dict[str, Any]:
        """Return counters and shares over all replicas, as plain data."""
        return {
            "idle_share": self.idle_share,
            "mfu": self.mfu,
            "mbu": self.mbu,
            "unfinished": self.unfinished,
            "starved": self.starved,
            "preemptions": sum(use.preemptions for use in self.replicas),
            "recomputed_tokens": sum(use.recomputed_tokens for use in self.replicas),
            "iterations": sum(use.iterations for use in self.replicas),
            "kv_peak_tokens": max((use.kv_peak_tokens for use in self.replicas), default=0),
            **self._prefix_cache_json(),
            **({"kv_joins": sum(len(use.joins) for use in self.replicas)} if self.groups > 1 else {}),
        }

    def _prefix_cache_json(self) -> dict[str, Any]:
        uses = [use.prefix_cache for use in self.replicas if use.prefix_cache is not None]
        if not uses:
            return {}
        queried, hit = sum(use.queried_tokens for use in uses), sum(use.hit_tokens for use in uses)
        return {
            "prefix_cache": {
                "queried_tokens": queried,
                "hit_tokens": hit,
                "hit_rate": hit / queried if queried else None,
                "kept_tokens": sum(use.kept_tokens for use in uses),
            }
        }
