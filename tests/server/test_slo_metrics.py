"""Latencies that clients ask for: counted by class, in the metrics and in the log."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
from msgspec.structs import replace
from tests.helpers.fake_engine import FakeEngine, fail, say

from headway.core.request import Slo
from headway.serving.metrics import GenerationRecord, ServerMetrics

pytestmark = pytest.mark.anyio

BODY: dict[str, Any] = {"model": "m", "prompt": [2, 3, 4], "max_tokens": 5}


def record(ttft: float | None = 1.0, last: float = 2.0, tokens: int = 5, slo: Slo = Slo(), reason: Any = "stop") -> Any:  # noqa: B008
    """A request that was received at 0 and ended at 10 s."""
    made = GenerationRecord(0.0, 3, *[lambda *_: None] * 4, slo=slo)
    made.first_token_s, made.last_token_s, made.output_tokens = ttft, last if ttft else None, tokens if ttft else 0
    made.reason, made.finished_s = reason, 10.0
    return made


@pytest.mark.parametrize(
    ("made", "met"),
    [
        (record(), {}),
        (record(slo=Slo(1.0, 0.25)), {"ttft": True, "tpot": True}),
        (record(slo=Slo(0.9, 0.24)), {"ttft": False, "tpot": False}),
        (record(tokens=1, last=1.0, slo=Slo(None, 0.01)), {"tpot": True}),
        (record(ttft=None, slo=Slo(1.0, 1.0), reason="timeout"), {"ttft": False, "tpot": False}),
        (record(slo=Slo(5.0, 5.0), reason="error"), {"ttft": False, "tpot": False}),
        (record(ttft=None, slo=Slo(5.0, 1.0), reason="abort"), {"ttft": False}),
        (record(ttft=None, slo=Slo(50.0, 1.0), reason="abort"), {}),
        (record(slo=Slo(5.0, None), reason="abort"), {"ttft": True}),
    ],
)
def test_an_objective_is_met_missed_or_not_to_be_told(made: Any, met: dict[str, bool]) -> None:
    assert made.objectives() == met


async def scrape(client: Any) -> dict[str, float]:
    text = (await client.get("/metrics")).text
    found = re.findall(r"^headway_(\w+)\{(.*)\} (\S+)$", text, re.MULTILINE)
    own = re.compile(r'(?:model_name|engine)="[^"]*",?')
    return {f"{name} {own.sub('', labels).strip(',')}": float(value) for name, labels, value in found}


async def test_asked_met_and_missed_count_by_class(connect: Any, engine: FakeEngine) -> None:
    async with connect(served_model_name=("m",), slo_min_ttft_s=1e-9) as client:
        await client.post("/v1/completions", json=BODY)
        await client.post("/v1/completions", json={**BODY, "slo": {"ttft_ms": 60000, "tpot_ms": 60000}})
        await client.post("/v1/completions", json={**BODY, "class": "agent"}, headers={"x-slo-ttft-ms": "0.000001"})
        long = {**BODY, "prompt": [2] * 4000, "slo": {"ttft_ms": 60000}}
        engine.info_value = replace(engine.info_value, long_tokens=100)
        engine.script = fail("timeout", after=[5])
        await client.post("/v1/completions", json=long)
        values = await scrape(client)
    assert {name: value for name, value in values.items() if name.startswith("slo_") and value} == {
        'slo_requests_asked_total class="short"': 1,
        'slo_requests_asked_total class="agent"': 1,
        'slo_requests_asked_total class="long"': 1,
        'slo_requests_met_total class="short"': 1,
        'slo_requests_missed_total class="agent"': 1,
        'slo_requests_missed_total class="long"': 1,
        'slo_targets_missed_total class="agent",target="ttft"': 1,
        'slo_targets_missed_total class="long",target="ttft"': 1,
    }
    assert values['class_time_to_first_token_seconds_count class="short"'] == 2
    assert values['class_worst_gap_seconds_count class="agent"'] == 1


async def test_counters_of_output_move_with_each_delta(connect: Any, engine: FakeEngine) -> None:
    import asyncio

    engine.gate = asyncio.Semaphore(2)
    engine.script = say([5, 6, 7, 8])
    async with connect(served_model_name=("m",)) as client:
        call = asyncio.create_task(client.post("/v1/completions", json=BODY))
        while (values := await scrape(client)).get("generation_tokens_total ", 0) < 3:
            await asyncio.sleep(0.01)
        # The fourth token, and the end, wait for the gate.
        assert values["generation_tokens_total "] == 3
        assert values["prompt_tokens_total "] == 3
        assert values['request_success_total finished_reason="stop"'] == 0
        for _ in range(4):
            engine.gate.release()
        await call
        assert (await scrape(client))["generation_tokens_total "] == 4


async def test_a_class_that_is_no_label_is_refused_and_many_classes_share_one(connect: Any, engine: FakeEngine) -> None:
    async with connect(served_model_name=("m",)) as client:
        for wrong in ("", "a b", 'x"', "y" * 33):
            answer = await client.post("/v1/completions", json={**BODY, "class": wrong})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "class")
    metrics = ServerMetrics(engine, "m")
    labels = [metrics.classes.label(f"c{i}") for i in range(20)]
    assert labels == [f"c{i}" for i in range(16)] + ["other"] * 4
    assert metrics.classes.label("c3") == "c3"


async def test_the_log_line_says_class_slo_and_worst_gap(
    connect: Any, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("headway.server").propagate = True
    with caplog.at_level(logging.INFO, "headway.server"):
        async with connect(served_model_name=("m",)) as client:
            await client.post("/v1/completions", json={**BODY, "slo": {"ttft_ms": 60000}, "class": "chat"})
            await client.post("/v1/completions", json={**BODY, "temperature": 9})
    first, second = (each.fields for each in caplog.records if each.message == "request")  # type: ignore[attr-defined]
    assert (first["class"], first["slo"]) == ("chat", "met")
    assert first["worst_gap_s"] >= 0
    assert second["reason"].startswith("'temperature' must be")
