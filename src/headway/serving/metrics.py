"""Prometheus metrics, each defined once and exported under `headway_...`, some also under `vllm:...`.

Existing dashboards and load balancers read the `vllm:` names; `ALIASES` lists the metrics that have one. There is no
global state: each server has its own registry.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from headway.core.errors import UnavailableError
from headway.runtime.cluster.cluster_report import InstanceAdmin
from headway.runtime.engine.protocol import EngineClient
from headway.serving.generation_job import GenerationJob
from headway.serving.generation_record import GenerationRecord
from headway.serving.instance_metrics import InstanceCollector
from headway.serving.slo_metrics import ClassMetrics
from headway.serving.utilisation_metrics import UtilisationCollector

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
        self.classes.asked(name, job.slo)
        most = job.params.max_tokens
        return GenerationRecord(
            job.received_s, prompt_tokens, self._first, self._gap, self._finish, self.rejected, job.slo, name, most
        )

    def _first(self, record: GenerationRecord, seconds: float, tokens: int) -> None:
        self._generation_tokens.inc(tokens)
        self._observe("time_to_first_token_seconds", seconds)
        self.classes.first(record.request_class, seconds)

    def _gap(self, record: GenerationRecord, seconds: float, tokens: int) -> None:
        self._generation_tokens.inc(tokens)
        # Several tokens in one delta share the gap, so that the histogram counts one entry per token.
        for _ in range(tokens):
            self._observe("inter_token_latency_seconds", seconds / tokens)
        self.classes.gap(record.request_class, seconds, tokens)

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
        for name, (text, field) in _ENGINE_GAUGES.items():
            yield self._gauge(name, text, getattr(stats, field))
        usage = stats.kv_tokens_used / stats.kv_tokens_total if stats.kv_tokens_total else 0.0
        yield self._gauge("kv_cache_usage_perc", "Share of the KV pool in use (0 to 1).", usage)
        yield self._gauge("engine_up", "1 when the engine serves, 0 otherwise.", float(self._engine.state == "ready"))
        for name, (text, field) in _ENGINE_COUNTERS.items():
            counter = CounterMetricFamily(PREFIX + name, text)
            counter.add_metric((), getattr(stats, field))
            yield counter
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

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        gauge = GaugeMetricFamily(PREFIX + name, text)
        gauge.add_metric((), value)
        return gauge


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
