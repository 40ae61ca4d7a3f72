"""What is measured: a record of each prompt's generation, Prometheus metrics made of them and of the engine's counters,
and the log's lines, of a request and of the server.

Prompts and answers are never logged, only their sizes. Metrics are defined once and exported under `headway_...`, some
also under `vllm:...`.
Existing dashboards and load balancers read the `vllm:` names; `ALIASES` lists the metrics that have one. There is no
global state: each server has its own registry.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from headway.core.errors import UnavailableError
from headway.core.request import Slo
from headway.perf.utilisation import UtilisationBase
from headway.runtime.cluster.instances import InstanceAdmin, InstanceReport
from headway.runtime.engine.protocol import EngineClient, EngineStats, FinishReason, OutputDelta
from headway.serving.jobs import GenerationJob


@dataclass(slots=True)
class GenerationRecord:
    """One prompt's times and counts. Times are `time.monotonic()` seconds, as stamped by the engine."""

    received_s: float
    prompt_tokens: int
    on_first: Callable[[GenerationRecord, float, int], None]
    """Called at the first delta that has tokens, with the seconds since `received_s` and the tokens."""
    on_gap: Callable[[GenerationRecord, float, int], None]
    """Called with the seconds since the previous delta, and the tokens, for each later delta that has tokens."""
    on_finish: Callable[[GenerationRecord], None]
    """Called once at the end, unless `on_reject` was."""
    on_reject: Callable[[int], None]
    """Called with the HTTP status when the engine refused the request."""
    slo: Slo = field(default_factory=Slo)
    """What the client asked for, within the operator's limits."""
    request_class: str = "short"
    """The name under which metrics count the request."""
    max_tokens: int = 0
    """Most output tokens that the request may have; 0: not known."""
    output_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache."""
    saved_s: float = 0.0
    """Seconds that computing them would have taken, by the latency model."""
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    finished_s: float | None = None
    worst_gap_s: float = 0.0
    """Longest time between two deltas with tokens."""
    reason: FinishReason | None = field(default=None)

    def observe(self, delta: OutputDelta) -> None:
        """Add a delta; called for each, in order."""
        if self.first_scheduled_s is None:
            self.first_scheduled_s = delta.first_scheduled_s
            self.cached_tokens, self.saved_s = delta.cached_tokens, delta.saved_s
        if not delta.tokens:
            return
        # 0.0: an engine that stamps no time, such as a test double.
        now = delta.emitted_s or time.monotonic()
        self.output_tokens += len(delta.tokens)
        if self.first_token_s is None:
            self.first_token_s = now
            self.on_first(self, max(0.0, now - self.received_s), len(delta.tokens))
        elif self.last_token_s is not None:
            gap = max(0.0, now - self.last_token_s)
            self.worst_gap_s = max(self.worst_gap_s, gap)
            self.on_gap(self, gap, len(delta.tokens))
        self.last_token_s = now

    def resume(self, delta: OutputDelta) -> None:
        """Add a delta from before a restart: its tokens count, its times do not."""
        self.output_tokens += len(delta.tokens)

    def finish(self, reason: FinishReason) -> None:
        """Set the end and its reason; only the first call has an effect."""
        if self.reason is None:
            self.reason = reason
            self.finished_s = time.monotonic()
            self.on_finish(self)

    def reject(self, status: int) -> None:
        """End the record as refused by the engine: counted under rejections and not under failures."""
        if self.reason is None:
            self.reason = "error"
            self.on_reject(status)

    @property
    def ttft_s(self) -> float | None:
        """Seconds from reception to the first token."""
        return None if self.first_token_s is None else max(0.0, self.first_token_s - self.received_s)

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds per output token after the first; None with fewer than two tokens."""
        if self.first_token_s is None or self.last_token_s is None or self.output_tokens < 2:
            return None
        return max(0.0, self.last_token_s - self.first_token_s) / (self.output_tokens - 1)

    def objectives(self) -> dict[str, bool]:
        """Return whether each objective that the client asked for was met, by name (`ttft`, `tpot`), once it is ended.

        As in `sim.metrics`: an objective that cannot be measured counts as missed, except that a request
        of one token has no TPOT to miss. A client that left is not held against the server: what had not been missed
        by then is left out.
        """
        met: dict[str, bool] = {}
        ended, left = self.finished_s or self.received_s, self.reason == "abort"
        ttft, tpot = self.ttft_s, self.tpot_s
        if self.slo.ttft_s is not None:
            if ttft is not None or not left:
                met["ttft"] = ttft is not None and ttft <= self.slo.ttft_s
            elif ended - self.received_s > self.slo.ttft_s:
                met["ttft"] = False
        if self.slo.tbt_s is not None and (ttft is not None or not left):
            met["tpot"] = ttft is not None and (tpot or 0.0) <= self.slo.tbt_s
        # A failed request has no answer to be in time.
        return {name: each and self.reason not in ("error", "timeout") for name, each in met.items()}


_MOST_CLASSES = 16
"""Names of clients' own, after which a new one counts under "other": each name costs a hundred series."""


class ClassMetrics:
    """Latency histograms and SLO counters, each with the label `class`.

    A class is what the request's `class` says, else `long` for prompts above `EngineInfo.long_tokens`, else `short`.
    """

    def __init__(self, prefix: str, registry: CollectorRegistry, long: Sequence[float], short: Sequence[float]) -> None:
        """long, short: buckets in seconds of whole requests and of single tokens."""

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(prefix + name, text, ("class",), buckets=buckets, registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(prefix + name, text, ("class", *labels), registry=registry)

        self.first = histogram(
            "class_time_to_first_token_seconds", "From reception to the first output token, by class.", long
        )
        self.gap = histogram("class_inter_token_latency_seconds", "Between two output tokens, by class.", short)
        self._worst = histogram("class_worst_gap_seconds", "A request's longest time between two tokens.", short)
        self.requested = counter("slo_requests_asked", "Requests that asked for a latency.")
        self._met = counter("slo_requests_met", "Requests that got all the latencies that they asked for.")
        self._missed = counter("slo_requests_missed", "Requests that missed a latency that they asked for.")
        self._targets = counter("slo_targets_missed", "Latencies asked for and missed: ttft, tpot.", "target")
        self._named: set[str] = set()
        self.met_total = self.missed_total = 0
        # The two classes of the server's own are there from the start, so that rates are defined before a request.
        for each in ("short", "long"):
            for metric in (self.first, self.gap, self._worst, self.requested, self._met, self._missed):
                metric.labels(each)
            for target in ("ttft", "tpot"):
                self._targets.labels(each, target)

    def label(self, request_class: str) -> str:
        """Return the label of a class: its name, or "other" for names beyond the first few."""
        if request_class in ("short", "long") or request_class in self._named:
            return request_class
        if len(self._named) >= _MOST_CLASSES:
            return "other"
        self._named.add(request_class)
        return request_class

    def finished(self, record: GenerationRecord) -> None:
        """Add an ended request."""
        name = record.request_class
        if record.output_tokens > 1:
            self._worst.labels(name).observe(record.worst_gap_s)
        objectives = record.objectives()
        if not objectives:
            return
        if all(objectives.values()):
            self.met_total += 1
            self._met.labels(name).inc()
            return
        self.missed_total += 1
        self._missed.labels(name).inc()
        for target, met in objectives.items():
            if not met:
                self._targets.labels(name, target).inc()


WINDOW_S = 10.0
"""Least time that a share is over, but for the first scrapes; at most it is that from one scrape to the next."""


class UtilisationCollector:
    """Collector of work and utilisation, read at each scrape; nothing while the peaks are not known."""

    def __init__(self, prefix: str, engine: EngineClient, clock: Callable[[], float] = time.monotonic) -> None:
        self._prefix = prefix
        self._engine = engine
        self._clock = clock
        # (time, FLOPs, bytes) of earlier scrapes: one from before the window, then those in it.
        self._samples: deque[tuple[float, float, float]] = deque([(clock(), 0.0, 0.0)])

    def collect(self) -> Iterator[Metric]:
        """Yield counters and gauges; called by the registry at each scrape."""
        try:
            base = self._engine.info.utilisation
        except UnavailableError:
            return
        if base is None:
            return
        flops, read = work_of(base, self._engine.stats)
        mfu, mbu = self._shares(base, flops, read)
        for name, text, value in (
            ("model_flops", "FLOPs of the model: matrix products and causal attention.", flops),
            ("model_bytes_read", "Bytes of weights, once a forward pass, and of KV read.", read),
        ):
            yield CounterMetricFamily(self._prefix + name, text, value=value)
        for name, text, peak in (
            ("peak_flops", "FLOP/s that the devices can do: a data sheet's, or measured at start-up.", base.peak_flops),
            ("peak_bandwidth", "Bytes/s that they can read: a data sheet's, or measured.", base.peak_bandwidth),
        ):
            gauge = GaugeMetricFamily(self._prefix + name, text, labels=("origin",))
            gauge.add_metric((base.origin,), peak)
            yield gauge
        over = f"over at least the last {WINDOW_S:g} s"
        yield GaugeMetricFamily(self._prefix + "mfu", f"Model FLOPs utilisation {over} (0 to 1).", value=mfu)
        yield GaugeMetricFamily(self._prefix + "mbu", f"Memory bandwidth utilisation {over} (0 to 1).", value=mbu)

    def _shares(self, base: UtilisationBase, flops: float, read: float) -> tuple[float, float]:
        """Return MFU and MBU since the newest sample that is old enough, else since the oldest."""
        now = self._clock()
        while len(self._samples) > 1 and now - self._samples[1][0] >= WINDOW_S:
            self._samples.popleft()
        then, flops_before, read_before = self._samples[0]
        # Scrapes in quick succession add no samples.
        if now - self._samples[-1][0] >= 1.0:
            self._samples.append((now, flops, read))
        seconds = now - then
        if seconds <= 0:
            return 0.0, 0.0
        return (
            max(0.0, flops - flops_before) / (seconds * base.peak_flops),
            max(0.0, read - read_before) / (seconds * base.peak_bandwidth),
        )


def work_of(base: UtilisationBase, stats: EngineStats) -> tuple[float, float]:
    """Return the FLOPs done and the bytes read since the engine started."""
    tokens = stats.prefill_tokens_total + stats.decode_tokens_total
    flops = base.flops(tokens, stats.attention_pairs_total)
    return flops, base.bytes_read(stats.passes_total, stats.kv_read_tokens_total)


_LABELS = ("instance", "role", "node")
_PREFIX = "headway_instance_"
_GAUGES = {
    "requests_running": ("Requests that hold a place in its scheduler.", "running"),
    "requests_waiting": ("Requests that wait in its scheduler.", "waiting"),
    "requests_placed": ("Requests of which any part is or will be there.", "placed"),
    "queued_tokens": ("Prompt tokens that are placed there and not computed.", "queued_tokens"),
    "free_in_seconds": ("Predicted time until all that is placed there is prefilled.", "free_in_s"),
    "kv_tokens_used": ("Tokens that its KV pool holds.", "kv_tokens_used"),
    "kv_tokens_capacity": ("Tokens that its KV pool can hold.", "kv_tokens_total"),
}
_COUNTERS = {
    "prefill_tokens_computed": ("Prompt tokens computed, in batches and in spans.", "prefill_tokens_total"),
    "decode_tokens_computed": ("Output tokens computed.", "decode_tokens_total"),
    "restarts": ("Times that its process was lost and started again.", "restarts_total"),
}


class InstanceCollector:
    """Collector of the controller's instance reports, read at each scrape."""

    def __init__(self, cluster: InstanceAdmin) -> None:
        self._cluster = cluster

    def collect(self) -> Iterable[Metric]:
        """Yield one family per metric, with a sample per instance; called by the registry at each scrape."""
        # One report per scrape, so that all samples are of the same moment.
        instances = self._cluster.report().instances
        up = GaugeMetricFamily(f"{_PREFIX}up", "1 when the instance serves, 0 otherwise.", labels=_LABELS)
        for each in instances:
            up.add_metric(_labels(each), float(each.state in ("ready", "draining")))
        yield up
        for name, (text, source) in _GAUGES.items():
            gauge = GaugeMetricFamily(_PREFIX + name, text, labels=_LABELS)
            for each in instances:
                gauge.add_metric(_labels(each), getattr(each, source))
            yield gauge
        for name, (text, source) in _COUNTERS.items():
            counter = CounterMetricFamily(_PREFIX + name, text, labels=_LABELS)
            for each in instances:
                counter.add_metric(_labels(each), getattr(each, source))
            yield counter


def _labels(report: InstanceReport) -> tuple[str, str, str]:
    return str(report.id), report.role, str(report.node)


PREFIX = "headway_"
RENDER_S = 0.5
"""Shortest time between two times that the metrics are made: scrapers, however many, share what is made."""
ALIAS_PREFIX = "vllm:"
ALIASES = {
    name: name
    for name in (
        "num_requests_waiting", "num_requests_running", "kv_cache_usage_perc", "cache_config_info",
        "time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds",
        "request_decode_time_seconds", "generation_tokens", "request_success", "num_preemptions",
        "request_prompt_tokens", "request_generation_tokens", "request_max_num_generation_tokens",
        "request_params_max_tokens", "request_inference_time_seconds", "prefix_cache_queries", "prefix_cache_hits",
    )
} | {"prefill_tokens_computed": "prompt_tokens"}  # fmt: skip
"""Metric families (counters without `_total`) that are exported under `vllm:` as well, with their name there."""

# Histogram buckets in seconds: `_LONG` for whole phases of a request, `_SHORT` for single tokens.
_LONG = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640, 1280, 2560)
_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5, 10, 40)
_HISTOGRAMS = {
    "time_to_first_token_seconds": ("From reception to the first output token.", _LONG),
    "inter_token_latency_seconds": ("Between two output tokens.", _SHORT),
    "request_time_per_output_token_seconds": ("A request's mean time per output token after the first.", _SHORT),
    "e2e_request_latency_seconds": ("From reception to the end.", _LONG),
    "request_queue_time_seconds": ("From reception to first being scheduled.", _LONG),
    "request_inference_time_seconds": ("From first being scheduled to the last output token.", _LONG),
    "request_prefill_time_seconds": ("From first being scheduled to the first output token.", _LONG),
    "request_decode_time_seconds": ("From the first output token to the last.", _LONG),
}
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576, 4194304)
_TOKEN_HISTOGRAMS = {
    "request_prompt_tokens": "A request's prompt tokens.",
    "request_generation_tokens": "A request's output tokens.",
    "request_max_num_generation_tokens": "Most output tokens of one choice of a request.",
    "request_params_max_tokens": "Output tokens that a request allowed.",
}
_ENGINE_COUNTERS = {
    "num_preemptions": ("Requests put back by the engine.", "preemptions_total"),
    "requests_refused_late": ("Requests refused that would be late and asked for that.", "refused_late_total"),
    "recomputed_tokens": ("Tokens computed again after a preemption.", "recomputed_tokens_total"),
    "prefill_tokens_computed": ("Prompt tokens computed; moves with each iteration.", "prefill_tokens_total"),
    "recoveries": ("Times that workers were lost and started again.", "recoveries_total"),
    "recovery_seconds": ("Time from losses being noticed until new workers were ready.", "recovery_s_total"),
    "lost_tokens": ("Tokens in the KV of lost workers, which are computed again.", "lost_tokens_total"),
    "engine_restarts": ("Times that the engine process was lost and started again.", "engine_restarts_total"),
    "decode_tokens_computed": ("Output tokens computed.", "decode_tokens_total"),
    "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", "prefix_queries_total"),
    "prefix_cache_hits": ("Tokens of these that were cached.", "prefix_hits_total"),
    "iterations": ("Iterations of the engine.", "iterations_total"),
    "busy_seconds": ("Time spent in iterations.", "busy_s_total"),
    "schedule_seconds": ("Time spent on deciding what runs.", "schedule_s_total"),
    "predicted_seconds": ("Time that the latency model predicted for those iterations.", "predicted_s_total"),
}
_ENGINE_GAUGES = {
    "num_requests_running": ("Requests that hold a place in the engine.", "running"),
    "num_requests_waiting": ("Requests that wait in the engine.", "waiting"),
    "num_requests_late": ("Waiting requests that will be late, so that others are in time.", "late"),
    "kv_tokens_used": ("Tokens that the KV pool holds.", "kv_tokens_used"),
    "kv_tokens_capacity": ("Tokens that the KV pool can hold.", "kv_tokens_total"),
    "kv_tokens_cached": ("Tokens of cached prefixes that no request uses.", "kv_tokens_cached"),
    "last_chunk_tokens": ("Prompt tokens in the newest iteration.", "last_chunk_tokens"),
    "last_iteration_seconds": ("Duration of the newest iteration.", "last_iteration_s"),
}


class ServerMetrics:
    """One server's metrics. `record` makes the per-request hooks; `render` returns the body of /metrics."""

    def __init__(self, engine: EngineClient, served_as: str | None) -> None:
        """served_as: the label `model_name`; None: the engine's own name, once it is known."""
        self._registry = CollectorRegistry()
        self._rendered, self._rendered_s = b"", float("-inf")
        inner = CollectorRegistry()
        self._histograms = {
            name: Histogram(PREFIX + name, text, buckets=buckets, registry=inner)
            for name, (text, buckets) in _HISTOGRAMS.items()
        }
        self._token_histograms = {
            name: Histogram(PREFIX + name, text, buckets=_TOKENS, registry=inner)
            for name, text in _TOKEN_HISTOGRAMS.items()
        }
        self.classes = ClassMetrics(PREFIX, inner, _LONG, _SHORT)
        self._engine = engine
        self._prompt_tokens = Counter(PREFIX + "prompt_tokens", "Prompt tokens accepted.", registry=inner)
        self._generation_tokens = Counter(PREFIX + "generation_tokens", "Output tokens produced.", registry=inner)
        self._finished = Counter(
            PREFIX + "request_success", "Requests by how they ended.", ("finished_reason",), registry=inner
        )
        for reason in ("stop", "length", "abort", "timeout", "error"):
            # Every reason is exported from the start, so that rates are defined before its first request.
            self._finished.labels(reason)
        self._rejected = Counter(
            PREFIX + "http_requests_rejected", "Generation requests not accepted, by status.",
            ("status",), registry=inner,
        )  # fmt: skip
        inner.register(_EngineCollector(engine))
        inner.register(UtilisationCollector(PREFIX, engine))
        if isinstance(engine, InstanceAdmin):
            inner.register(InstanceCollector(engine))
        self._registry.register(_AliasedRegistry(inner, engine, served_as))

    def record(self, job: GenerationJob, prompt_tokens: int) -> GenerationRecord:
        """Make a record of one accepted prompt of a job that reports into these metrics."""
        length = "long" if prompt_tokens > self._engine.info.long_tokens else "short"
        name = self.classes.label(job.request_class or length)
        self._prompt_tokens.inc(prompt_tokens)
        if job.slo != Slo():
            self.classes.requested.labels(name).inc()
        most = job.params.max_tokens
        return GenerationRecord(
            job.received_s, prompt_tokens, self._first, self._gap, self._finish, self.rejected, job.slo, name, most
        )

    def _first(self, record: GenerationRecord, seconds: float, tokens: int) -> None:
        self._generation_tokens.inc(tokens)
        self._observe("time_to_first_token_seconds", seconds)
        self.classes.first.labels(record.request_class).observe(seconds)

    def _gap(self, record: GenerationRecord, seconds: float, tokens: int) -> None:
        self._generation_tokens.inc(tokens)
        gaps = self.classes.gap.labels(record.request_class)
        # Several tokens in one delta share the gap, so that histograms count one entry per token.
        for _ in range(tokens):
            self._observe("inter_token_latency_seconds", seconds / tokens)
            gaps.observe(seconds / tokens)

    def rejected(self, status: int) -> None:
        """Count a generation request that was refused with an HTTP status; called once for each."""
        self._rejected.labels(str(status)).inc()

    def render(self) -> bytes:
        """Return all metrics in the text exposition format, version 0.0.4, made at most twice a second."""
        now = time.monotonic()
        if now - self._rendered_s >= RENDER_S:
            self._rendered, self._rendered_s = generate_latest(self._registry), now
        return self._rendered

    def _finish(self, record: GenerationRecord) -> None:
        self._finished.labels(record.reason).inc()
        self.classes.finished(record)
        sizes = {"prompt": record.prompt_tokens, "generation": record.output_tokens}
        for what, tokens in sizes.items():
            self._token_histograms[f"request_{what}_tokens"].observe(tokens)
        # One record is one choice.
        self._token_histograms["request_max_num_generation_tokens"].observe(record.output_tokens)
        if record.max_tokens:
            self._token_histograms["request_params_max_tokens"].observe(record.max_tokens)
        scheduled, first, last, end = (
            record.first_scheduled_s, record.first_token_s, record.last_token_s, record.finished_s,
        )  # fmt: skip
        # Aborted and failed requests would make the end-to-end latency look short.
        if record.reason in ("stop", "length") and end is not None:
            self._observe("e2e_request_latency_seconds", end - record.received_s)
        if scheduled is not None:
            self._observe("request_queue_time_seconds", scheduled - record.received_s)
            if first is not None:
                self._observe("request_prefill_time_seconds", first - scheduled)
            if last is not None:
                self._observe("request_inference_time_seconds", last - scheduled)
        if first is not None and last is not None:
            self._observe("request_decode_time_seconds", last - first)
            # Mean over the gaps: n tokens have n - 1.
            if record.output_tokens > 1:
                self._observe("request_time_per_output_token_seconds", (last - first) / (record.output_tokens - 1))

    def _observe(self, name: str, seconds: float) -> None:
        self._histograms[name].observe(max(0.0, seconds))


class _EngineCollector:
    """The engine's newest stats snapshot as metrics, read at each scrape."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """Yield one family per gauge and counter; called by the registry at each scrape."""
        stats = self._engine.stats
        for name, (text, source) in _ENGINE_GAUGES.items():
            yield GaugeMetricFamily(PREFIX + name, text, value=getattr(stats, source))
        text = "Share of the KV pool in use (0 to 1)."
        yield GaugeMetricFamily(PREFIX + "kv_cache_usage_perc", text, value=_share(stats))
        up = float(self._engine.state == "ready")
        yield GaugeMetricFamily(PREFIX + "engine_up", "1 when the engine serves, 0 otherwise.", value=up)
        for name, (text, source) in _ENGINE_COUNTERS.items():
            yield CounterMetricFamily(PREFIX + name, text, value=getattr(stats, source))
        if stats.stage_busy_s:
            busy = CounterMetricFamily(
                PREFIX + "stage_busy_seconds",
                "Time that a pipeline stage of a KV group computed.",
                labels=("group", "stage"),
            )
            for group, stage, seconds in stats.stage_busy_s:
                busy.add_metric((str(group), str(stage)), seconds)
            yield busy
        try:
            # Not known until the engine has started: the family is left out until then.
            info = self._engine.info
        except UnavailableError:
            return
        config = GaugeMetricFamily(
            PREFIX + "cache_config_info", "How the KV pool is made.",
            labels=("block_size", "num_gpu_blocks", "cache_dtype"),
        )  # fmt: skip
        blocks = info.kv_tokens_total // max(1, info.kv_block_tokens)
        config.add_metric((str(info.kv_block_tokens), str(blocks), info.dtype), 1)
        yield config


class _AliasedRegistry:
    """Exports each family under its own name, and those in `ALIASES` under the alias prefix too, with common labels."""

    def __init__(self, inner: CollectorRegistry, engine: EngineClient, served_as: str | None) -> None:
        self._inner = inner
        self._engine = engine
        self._served_as = served_as

    def collect(self) -> Iterable[Metric]:
        """Yield all families of the inner registry, renamed; called by the registry at each scrape."""
        labels = {"model_name": self._model(), "engine": "0"}
        for family in self._inner.collect():
            name = family.name.removeprefix(PREFIX)
            yield _shown(family, family.name, labels)
            if name in ALIASES:
                yield _shown(family, ALIAS_PREFIX + ALIASES[name], labels)

    def _model(self) -> str:
        if self._served_as is not None:
            return self._served_as
        try:
            return self._engine.info.model
        except UnavailableError:
            return ""


def _shown(family: Metric, shown_as: str, labels: dict[str, str]) -> Metric:
    shown = Metric(shown_as, family.documentation, family.type)
    for sample in family.samples:
        # Leave out prometheus_client's creation timestamps, one more series per counter and histogram.
        if not sample.name.endswith("_created"):
            shown.add_sample(
                shown_as + sample.name.removeprefix(family.name), {**labels, **sample.labels}, sample.value
            )
    return shown


log = logging.getLogger("headway.server")

# The log line of a request (`core.logs`). Prompts and answers are never logged, only their sizes.


def log_request(
    request_id: str, method: str, path: str, status: int, duration_s: float, records: Sequence[GenerationRecord],
    client: str | None, refused: str | None = None,
) -> None:  # fmt: skip
    """Log one line for a finished HTTP request; at debug level for probes and for the files of pages."""
    fields: dict[str, Any] = {"request_id": request_id, "method": method, "path": path, "status": status}
    fields["duration_s"] = round(duration_s, 6)
    if client is not None:
        fields["client"] = client
    if refused is not None:
        # Cut: a message may quote a field of the body, never its text at length.
        fields["reason"] = refused[:200]
    if records:
        fields["prompt_tokens"] = sum(record.prompt_tokens for record in records)
        fields["output_tokens"] = sum(record.output_tokens for record in records)
        earliest = min((r for r in records if r.ttft_s is not None), key=lambda r: r.first_token_s or 0.0, default=None)
        # Of a batch of prompts, the earliest first token.
        fields["ttft_s"] = None if earliest is None or earliest.ttft_s is None else round(earliest.ttft_s, 6)
        if earliest is not None and earliest.first_scheduled_s is not None and earliest.first_token_s is not None:
            # Of its time to first token: waiting, and computing; and what the cached tokens saved of the latter.
            fields["queue_s"] = round(max(0.0, earliest.first_scheduled_s - earliest.received_s), 6)
            fields["computed_s"] = round(max(0.0, earliest.first_token_s - earliest.first_scheduled_s), 6)
            if earliest.cached_tokens:
                fields["cached_tokens"] = earliest.cached_tokens
                fields["cached_saved_s"] = round(earliest.saved_s, 6)
        fields["class"] = records[0].request_class
        judged = [objectives for record in records if (objectives := record.objectives())]
        if judged:
            fields["slo"] = "met" if all(all(each.values()) for each in judged) else "missed"
        gaps = [record.worst_gap_s for record in records if record.output_tokens > 1]
        if gaps:
            fields["worst_gap_s"] = round(max(gaps), 6)
        fields["finish_reason"] = ",".join(str(record.reason) for record in records)
    quiet = path in ("/health", "/ready", "/metrics", "/v1/live", "/favicon.ico") or path.startswith("/ui/")
    log.log(logging.DEBUG if quiet else logging.INFO, "request", extra={"fields": fields})


class StatusLine:
    """The figures of an interval: differences of counters between two calls of `fields`."""

    def __init__(self, engine: EngineClient, metrics: ServerMetrics) -> None:
        self._engine = engine
        self._metrics = metrics
        self._stats = engine.stats
        self._slo = self._slo_counts()

    async def run(self, every_s: float) -> None:
        """Log a line every `every_s` seconds in which there was work, until cancelled."""
        last = time.monotonic()
        while True:
            await asyncio.sleep(every_s)
            now = time.monotonic()
            fields = self.fields(now - last)
            last = now
            if fields is not None:
                log.info("status", extra={"fields": fields})

    def fields(self, seconds: float) -> dict[str, Any] | None:
        """Return the figures of the last `seconds` seconds; None when nothing ran, waited or was computed.

        Rates are in tokens a second. `slo`: share of the requests that ended in the interval with all the latencies
        that they had asked for; left out where none had asked.
        """
        before, stats = self._stats, self._engine.stats
        slo_before, slo = self._slo, self._slo_counts()
        self._stats, self._slo = stats, slo
        prefill = stats.prefill_tokens_total - before.prefill_tokens_total
        decode = stats.decode_tokens_total - before.decode_tokens_total
        if not (stats.running or stats.waiting or prefill or decode):
            return None
        fields: dict[str, Any] = {"running": stats.running, "waiting": stats.waiting}
        fields["prefill_tok_s"] = round(prefill / seconds)
        fields["decode_tok_s"] = round(decode / seconds)
        fields["kv"] = f"{_share(stats):.0%}"
        met, missed = (now - then for now, then in zip(slo, slo_before, strict=True))
        if met + missed:
            fields["slo"] = f"{met / (met + missed):.0%}"
        return fields

    def _slo_counts(self) -> tuple[int, int]:
        return self._metrics.classes.met_total, self._metrics.classes.missed_total


def _share(stats: EngineStats) -> float:
    return stats.kv_tokens_used / stats.kv_tokens_total if stats.kv_tokens_total else 0.0
