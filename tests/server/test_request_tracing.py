"""OpenTelemetry spans of requests: attributes of vLLM's, children for the phases, the client's trace above."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from tests.helpers.fake_engine import FakeEngine

from headway.core.errors import ConfigError, OverloadedError
from headway.serving.tracing import RequestTracer, open_tracer

pytestmark = pytest.mark.anyio
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
BODY = {"model": "fake-model", "prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0.5, "top_p": 0.9}


async def spans_of(application: Any, body: dict[str, Any], **headers: str) -> Sequence[ReadableSpan]:
    """The spans of one request to a server with a tracer."""
    import httpx

    exporter = InMemorySpanExporter()
    async with application() as app:
        app.state.headway.tracer = RequestTracer(SimpleSpanProcessor(exporter), "1")
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            await client.post("/v1/completions", json=body, headers=headers)
        return exporter.get_finished_spans()


async def test_a_request_has_a_span_with_its_phases_below(application: Any, engine: FakeEngine) -> None:
    spans = {one.name: one for one in await spans_of(application, BODY, **{"x-request-id": "mine"})}
    assert set(spans) == {"llm_request", "queue", "prefill", "decode"}
    whole = spans["llm_request"]
    assert whole.attributes is not None
    told = dict(whole.attributes)
    expected = {
        "gen_ai.request.id": "mine", "gen_ai.response.model": "fake-model", "gen_ai.usage.prompt_tokens": 3,
        "gen_ai.usage.completion_tokens": 4, "gen_ai.request.max_tokens": 4, "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9, "gen_ai.request.n": 1,
    }  # fmt: skip
    assert expected.items() <= told.items()
    latencies = {name.rpartition(".")[2] for name in told if name.startswith("gen_ai.latency.")}
    assert latencies == {
        "e2e", "time_to_first_token", "time_in_queue", "time_in_model_prefill", "time_in_model_decode",
        "time_in_model_inference",
    }  # fmt: skip
    assert whole.resource.attributes["service.name"] == "headway"
    phases = [spans[name] for name in ("queue", "prefill", "decode")]
    for before, after in pairwise(phases):
        assert before.end_time == after.start_time
    for phase in phases:
        assert phase.parent is not None
        assert whole.context is not None
        assert phase.parent.span_id == whole.context.span_id
        assert whole.start_time <= phase.start_time <= phase.end_time <= whole.end_time


@pytest.mark.parametrize("sampled", ["01", "00"])
async def test_the_trace_of_the_client_goes_on(application: Any, engine: FakeEngine, sampled: str) -> None:
    spans = await spans_of(application, BODY, traceparent=f"00-{TRACE}-{SPAN}-{sampled}")
    # A client that samples nothing gets nothing.
    assert bool(spans) == (sampled == "01")
    for one in spans:
        assert one.context is not None
        assert f"{one.context.trace_id:032x}" == TRACE
    above = [f"{one.parent.span_id:016x}" for one in spans if one.name == "llm_request" and one.parent]
    assert above == [SPAN] * len(above)


async def test_each_choice_has_a_span_and_a_broken_traceparent_none_above(application: Any, engine: FakeEngine) -> None:
    spans = await spans_of(application, {**BODY, "n": 2}, traceparent="nonsense")
    whole = [one for one in spans if one.name == "llm_request"]
    assert [one.parent for one in whole] == [None, None]


async def test_a_refused_request_is_an_error_without_phases_of_computing(application: Any, engine: FakeEngine) -> None:
    engine.refuse = OverloadedError("full")
    spans = {one.name: one for one in await spans_of(application, BODY)}
    assert set(spans) == {"llm_request", "queue"}
    assert spans["llm_request"].status.status_code is StatusCode.ERROR
    assert "429" in (spans["llm_request"].status.description or "")


def test_a_wrong_endpoint_is_refused_in_a_sentence() -> None:
    with pytest.raises(ConfigError, match="http://HOST:4318/v1/traces"):
        open_tracer("localhost:4317", "1")
