"""The result of a simulated run: records of requests, counters of replicas, iterations, and all of it as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from headway.core.batch import Batch
from headway.core.request import Request
from headway.perf.latency.table import ServingOverhead
from headway.perf.utilisation import UtilisationBase
from headway.sim.metrics import RequestRecord, RunSummary, SloTargets, slowest, summarise
from headway.sim.prefix_cache import PrefixCacheUse
from headway.sim.workload import TraceRequest


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

    iterations: int = 0
    """Iterations, each repetition of decodes counted."""
    batches: int = 0
    """Decisions of the scheduler; fewer than iterations where decodes were repeated."""
    busy_s: float = 0.0
    """Seconds that stage 0 computed, the mean over KV groups."""
    prefill_tokens: int = 0
    decode_tokens: int = 0
    kv_read_tokens: int = 0
    """KV tokens that attention read, for decodes and chunks."""
    attention_pairs: float = 0.0
    """Pairs of a query token and a KV token, counted causally; for FLOPs."""
    preemptions: int = 0
    recomputed_tokens: int = 0
    kv_peak_tokens: int = 0
    """Most KV tokens in use at a time, of all KV groups together."""
    scheduling_s: float = 0.0
    """Real seconds spent in the scheduler; 0 without a stopwatch."""
    more_passes: int = 0
    """Forward passes of KV groups beyond the first in an iteration; each reads the weights again."""
    joins: tuple[GroupJoin, ...] = ()
    """KV groups that joined a long request."""
    prefix_cache: PrefixCacheUse | None = None
    """None: it had none."""


WORK = ("iterations", "batches", "prefill_tokens", "decode_tokens", "kv_read_tokens", "attention_pairs", "preemptions",
        "recomputed_tokens")  # fmt: skip
"""Counters of `ReplicaUse` that add up over the engines of an instance."""


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
        return summarise(self.records, duration_s=self.duration_s)

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


class SimulatedRequest(Protocol):
    """The progress of a request, as both simulators keep it."""

    request: Request
    source: TraceRequest
    times: list[float]
    """Times of the output tokens, virtual seconds."""
    scheduled_s: float | None
    ended_s: float | None
    error: str | None
    """Reason for ending without all of the output; None otherwise."""
    rejected: bool
    """Whether the request was refused before it was scheduled."""
    cached_tokens: int
    """Tokens of the prompt that were cached when it was scheduled."""


def record_of(one: SimulatedRequest, targets: SloTargets) -> RequestRecord:
    """Return the record of a request. One that has not ended gets the error "unfinished"."""
    # reports count errors by the text before the colon
    error = f"rejected: {one.error}" if one.rejected else one.error
    request, done = one.request, one.ended_s is not None and one.error is None
    return RequestRecord(
        id=request.id,
        klass=one.source.klass,
        arrival_s=request.arrival_s,
        prompt_tokens=request.prompt_tokens,
        output_tokens=len(one.times),
        sent_s=request.arrival_s,
        scheduled_s=one.scheduled_s,
        token_s=tuple(one.times),
        finish_s=one.ended_s if done else None,
        slo=targets,
        finish_reason="length" if done else None,
        error=None if done else error or "unfinished",
        rejected=one.rejected,
        cached_tokens=one.cached_tokens,
    )


def later(record: RequestRecord, serving: ServingOverhead, tokens: int = 0) -> RequestRecord:
    """Return the record with all but its arrival later: as the client sees a server's. tokens: of its prompt, where
    the simulation did not let it wait for them to be read."""
    by_s = serving.token_s * tokens
    if serving.request_s:
        by_s += serving.way_s(f"{record.id} {record.arrival_s}")
    if not by_s:
        return record
    return replace(
        record,
        scheduled_s=None if record.scheduled_s is None else record.scheduled_s + by_s,
        token_s=tuple(at_s + by_s for at_s in record.token_s),
        finish_s=None if record.finish_s is None else record.finish_s + by_s,
    )


SCHEMA = "headway.simulate/1"

_T975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
         2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045)  # fmt: skip
"""97.5% quantiles of Student's t for 1, 2, … degrees of freedom."""


def run_json(result: SimResult, seed: int) -> dict[str, Any]:
    """Return the JSON of one seed: the summary, starved and unfinished requests by class, and utilisation."""
    body = result.summary().to_json()
    starved: dict[str, int] = {}
    for record in result.records:
        if record.scheduled_s is None and not record.rejected:
            starved[record.klass] = starved.get(record.klass, 0) + 1
    # the loop's first block is the total, the others are classes; each gets its share of requests never scheduled
    for block in (body["total"], *body["classes"]):
        count = result.starved if block is body["total"] else starved.get(block["class"], 0)
        block["starved_share"] = count / block["requests"] if block["requests"] else None
        block["unfinished"] = block["errors"].get("unfinished", 0)
    use = result.use_json()
    decided_s = sum(replica.scheduling_s for replica in result.replicas)
    # only runs with a stopwatch have it: without one the output stays deterministic
    if decided_s:
        jct_s = sum(r.finish_s - r.arrival_s for r in result.records if r.finish_s is not None)
        use["scheduling_s"] = decided_s
        use["scheduling_share_of_jct"] = decided_s / jct_s if jct_s else None
    return {"seed": seed, **body, "use": use, "slowest": slowest(result.records, result.duration_s)}


def point_json(at: Mapping[str, Any], runs: Sequence[dict[str, Any]], why: str | None = None) -> dict[str, Any]:
    """One point of a sweep (or the only one): `mean` and `ci95` have the shape of a run, over its seeds.

    A layout that does not fit in memory is a point without runs; `why` has the reason.
    """
    return {
        "at": dict(at),
        "feasible": why is None,
        "why": why,
        "mean": _over(runs, _mean) if runs else None,
        "ci95": _over(runs, _half_width) if len(runs) > 1 else None,
        "runs": list(runs),
    }


def document(scenario: Mapping[str, Any], points: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the whole result file."""
    return {"schema": SCHEMA, "scenario": dict(scenario), "points": list(points)}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _half_width(values: Sequence[float]) -> float:
    """Half of the 95% confidence interval of the mean (Student's t; seeds are independent)."""
    n = len(values)
    if n < 2:
        return 0.0
    mean = _mean(values)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (n - 1))
    return (_T975[n - 2] if n - 2 < len(_T975) else 1.96) * deviation / math.sqrt(n)


def _over(runs: Sequence[Any], reduce: Any) -> Any:
    """Return the runs' common shape with numbers reduced over runs; None where no run has one.

    Classes are matched by name.
    """
    first = next((run for run in runs if run is not None), None)
    if isinstance(first, Mapping):
        # union of keys in order of first appearance: a run may lack an optional one
        keys = dict.fromkeys(key for run in runs if run is not None for key in run)
        return {
            key: _classes([run["classes"] for run in runs], reduce)
            if key == "classes"
            else _over([run.get(key) for run in runs if run is not None], reduce)
            for key in keys
            if key not in ("seed", "schema", "errors", "slowest")
        }
    numbers = [float(run) for run in runs if isinstance(run, int | float)]
    return reduce(numbers) if numbers else first


def _classes(runs: Sequence[Sequence[Mapping[str, Any]]], reduce: Any) -> list[Any]:
    names = dict.fromkeys(block["class"] for blocks in runs for block in blocks)
    return [_over([block for blocks in runs for block in blocks if block["class"] == name], reduce) for name in names]
