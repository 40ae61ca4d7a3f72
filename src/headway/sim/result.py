"""What a run leaves: a record of every request, what each replica did, and (if kept) every iteration."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from headway.sim.metrics import RequestRecord, RunSummary, summarise
from headway.sim.metrics.quantiles import PERCENTILES
from headway.sim.spec import UtilisationBase


class IterationRecord(NamedTuple):
    """A batch, as carried out. `stages`: (start, end) seconds in each pipeline stage, of its first repetition.
    `groups`: the KV groups that had a part in it; decode_kv is what they read together."""

    replica: int
    batch: int
    stages: tuple[tuple[float, float], ...]
    done_s: float
    decodes: int
    decode_kv: int
    chunks: tuple[tuple[str, int, int], ...]
    predicted_s: float
    repeats: int
    groups: tuple[int, ...] = (0,)


class GroupJoin(NamedTuple):
    """A KV group joins a request: from token `start` on it holds and computes it, as one of `groups`."""

    at_s: float
    replica: int
    request: str
    group: int
    start: int
    groups: int


@dataclass(frozen=True)
class ReplicaUse:
    """What one replica did. busy_s is stage 0's, the mean of its KV groups; tokens count rows of forward passes
    (recomputed ones included); more_passes: forward passes of further groups in the same iterations; kv_peak_tokens is
    that of all groups together; joins: KV groups that took over a long request."""

    iterations: int
    batches: int
    busy_s: float
    prefill_tokens: int
    decode_tokens: int
    kv_read_tokens: int
    attention_pairs: float
    preemptions: int
    recomputed_tokens: int
    kv_peak_tokens: int
    scheduling_s: float = 0.0
    more_passes: int = 0
    joins: tuple[GroupJoin, ...] = ()


@dataclass(frozen=True)
class SimResult:
    """`duration_s`: the window, or the time from the first arrival to the last end. Nothing ends silently: requests
    that the window cut off are records with the error "unfinished"."""

    records: tuple[RequestRecord, ...]
    replicas: tuple[ReplicaUse, ...]
    duration_s: float
    iterations: tuple[IterationRecord, ...] = ()
    yardstick: UtilisationBase | None = None
    stages: int = 1
    groups: int = 1

    @cached_property
    def _summary(self) -> RunSummary:
        return summarise(self.records, duration_s=self.duration_s, percents=PERCENTILES)

    def summary(self) -> RunSummary:
        """Per class and in all; latencies are over requests that finished."""
        return self._summary

    @property
    def unfinished(self) -> int:
        return sum(record.error == "unfinished" for record in self.records)

    @property
    def starved(self) -> int:
        """Requests that were never scheduled, among those that nobody refused."""
        return sum(r.scheduled_s is None and not r.rejected for r in self.records)

    @property
    def idle_share(self) -> float:
        """Share of the run in which stage 0 computed nothing, over all replicas."""
        whole = self.duration_s * len(self.replicas)
        return max(0.0, 1.0 - sum(use.busy_s for use in self.replicas) / whole) if whole > 0 else 0.0

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation over the whole run, all devices; None without a yardstick."""
        if self.yardstick is None or not self.duration_s:
            return None
        shape = self.yardstick.shape
        flops = sum(
            shape.linear_flops(use.prefill_tokens + use.decode_tokens) + shape.pairs_flops(use.attention_pairs)
            for use in self.replicas
        )
        return flops / (self.duration_s * self.yardstick.peak_flops * len(self.replicas))

    @property
    def mbu(self) -> float | None:
        """Memory bandwidth utilisation over the whole run, all devices; None without a yardstick."""
        if self.yardstick is None or not self.duration_s:
            return None
        shape = self.yardstick.shape
        weights = shape.parameters * shape.dtype_bytes
        passes = sum(use.iterations + use.more_passes for use in self.replicas)
        read = passes * weights + sum(use.kv_read_tokens * shape.kv_bytes_per_token for use in self.replicas)
        return read / (self.duration_s * self.yardstick.peak_bandwidth * len(self.replicas))

    def use_json(self) -> dict[str, Any]:
        """What replicas did, as plain data."""
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
            **({"kv_joins": sum(len(use.joins) for use in self.replicas)} if self.groups > 1 else {}),
        }
