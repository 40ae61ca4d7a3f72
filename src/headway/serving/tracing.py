"""OpenTelemetry spans of requests, with the attributes that vLLM gives its own (`vllm.tracing.SpanAttributes`, 0.32).

One span `llm_request` for each prompt and choice, below the client's where it sends `traceparent`, with children
`queue`, `prefill` and `decode`. Made when the request has ended, so that nothing of it is on the way of a token.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from headway.core.errors import ConfigError
from headway.serving.jobs import GenerationJob
from headway.serving.metrics import GenerationRecord

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import SpanProcessor

_NEEDED = "--otlp-traces-endpoint needs OpenTelemetry: pip install 'headway[otel]'"


class RequestTracer:
    """Makes the spans of one server's requests."""

    def __init__(self, processor: SpanProcessor, version: str) -> None:
        """processor: receives the spans. The service's name is OTEL_SERVICE_NAME's, else headway."""
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider

        # The environment's name wins over ours.
        resource = Resource.create({"service.name": "headway"}).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("headway", version)

    def follow(
        self, headers: Mapping[str, str], request_id: str, job: GenerationJob, records: Sequence[GenerationRecord]
    ) -> None:
        """Make spans of an accepted request when its records end. headers: for `traceparent` and `tracestate`."""
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        parent = TraceContextTextMapPropagator().extract(carrier)
        for record in records:
            self._follow(record, parent, request_id, job)

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()

    def _follow(self, record: GenerationRecord, parent: Context, request_id: str, job: GenerationJob) -> None:
        finish, reject = record.on_finish, record.on_reject

        def on_finish(of: GenerationRecord) -> None:
            finish(of)
            self._span(of, parent, request_id, job)

        def on_reject(status: int) -> None:
            reject(status)
            self._span(record, parent, request_id, job, refused=f"refused with {status}")

        record.on_finish, record.on_reject = on_finish, on_reject

    def _span(
        self, record: GenerationRecord, parent: Context, request_id: str, job: GenerationJob, refused: str = ""
    ) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        # Records have CLOCK_MONOTONIC, spans the time of day.
        ahead_ns = time.time_ns() - time.monotonic_ns()

        def at_ns(seconds: float) -> int:
            return int(seconds * 1e9) + ahead_ns

        end_s = record.finished_s if record.finished_s is not None else time.monotonic()
        span = self._tracer.start_span(
            "llm_request",
            context=parent,
            kind=SpanKind.SERVER,
            attributes=_attributes(record, request_id, job, end_s),
            start_time=at_ns(record.received_s),
        )
        if refused or record.reason in ("error", "timeout"):
            span.set_status(Status(StatusCode.ERROR, refused or str(record.reason)))
        inside = set_span_in_context(span)
        for name, start_s, stop_s in _phases(record, end_s):
            child = self._tracer.start_span(name, context=inside, start_time=at_ns(start_s))
            child.end(at_ns(stop_s))
        span.end(at_ns(max(end_s, record.received_s)))


def open_tracer(endpoint: str, version: str) -> RequestTracer:
    """Return a tracer that sends to an OTLP endpoint over HTTP, such as http://localhost:4318/v1/traces.

    Raises ConfigError where the packages are missing, or for an address that is none.
    """
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"--otlp-traces-endpoint {endpoint}: name it as http://HOST:4318/v1/traces (OTLP over HTTP)")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        raise ConfigError(_NEEDED) from error
    return RequestTracer(BatchSpanProcessor(OTLPSpanExporter(endpoint)), version)


def _phases(record: GenerationRecord, end_s: float) -> list[tuple[str, float, float]]:
    """Return (name, start, end) of the phases that the request came to."""
    scheduled_s, first_s, last_s = record.first_scheduled_s, record.first_token_s, record.last_token_s
    edges = [("queue", record.received_s), ("prefill", scheduled_s), ("decode", first_s)]
    begun = [(name, at_s) for name, at_s in edges if at_s is not None]
    ends = [at_s for _, at_s in begun[1:]] + [last_s if first_s is not None and last_s is not None else end_s]
    return [(name, at_s, max(at_s, until_s)) for (name, at_s), until_s in zip(begun, ends, strict=True)]


def _attributes(
    record: GenerationRecord, request_id: str, job: GenerationJob, end_s: float
) -> dict[str, str | int | float]:
    scheduled_s, first_s, last_s = record.first_scheduled_s, record.first_token_s, record.last_token_s
    found: dict[str, str | int | float | None] = {
        "gen_ai.request.id": request_id,
        "gen_ai.response.model": job.model,
        "gen_ai.request.max_tokens": job.params.max_tokens,
        "gen_ai.request.temperature": job.params.temperature,
        "gen_ai.request.top_p": job.params.top_p,
        "gen_ai.request.n": job.choices,
        "gen_ai.usage.prompt_tokens": record.prompt_tokens,
        "gen_ai.usage.completion_tokens": record.output_tokens,
        "gen_ai.latency.e2e": end_s - record.received_s,
        "gen_ai.latency.time_to_first_token": record.ttft_s,
        "gen_ai.latency.time_in_queue": _difference(record.received_s, scheduled_s),
        "gen_ai.latency.time_in_model_prefill": _difference(scheduled_s, first_s),
        "gen_ai.latency.time_in_model_decode": _difference(first_s, last_s),
        "gen_ai.latency.time_in_model_inference": _difference(scheduled_s, last_s),
    }
    return {name: value for name, value in found.items() if value is not None}


def _difference(start_s: float | None, end_s: float | None) -> float | None:
    return None if start_s is None or end_s is None else max(0.0, end_s - start_s)
