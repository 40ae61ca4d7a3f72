"""Metrics, health, logs, token endpoints, and the API's own description."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.helpers.asgi_driver import Caller
from tests.helpers.fake_engine import FakeEngine, fail, say

from headway.core.logs import JsonFormatter, TextFormatter
from headway.runtime.engine.protocol import EngineStats
from headway.serving.metrics import ALIASES

pytestmark = pytest.mark.anyio

PATH = "/v1/completions"
BODY: dict[str, Any] = {"model": "m", "prompt": [2, 3, 4], "max_tokens": 5}

Values = Callable[[str], float]


async def _scrape(client: Any) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    answer = await client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "m"
            assert labels.pop("engine") == "0"
            found[sample.name, tuple(sorted(labels.items()))] = sample.value
    return found


async def test_metrics_show_the_engine_and_the_requests(connect: Any, engine: FakeEngine) -> None:
    engine.stats = EngineStats(
        running=3, waiting=4, kv_tokens_used=2048, kv_tokens_total=8192, preemptions_total=6, iterations_total=70,
        recomputed_tokens_total=11, busy_s_total=1.5, prefill_tokens_total=9,
    )  # fmt: skip
    async with connect(served_model_name=("m", "alias")) as client:
        await client.post(PATH, json=BODY)
        engine.script = say([5])
        await client.post(PATH, json={**BODY, "model": "alias", "stream": True})
        engine.script = fail("timeout", after=[5])
        await client.post(PATH, json=BODY)
        await client.post(PATH, json={**BODY, "temperature": 7})
        values = await _scrape(client)
    for prefix in ("headway_", "vllm:"):
        assert values[f"{prefix}num_requests_running", ()] == 3
        assert values[f"{prefix}num_requests_waiting", ()] == 4
        assert values[f"{prefix}kv_cache_usage_perc", ()] == 0.25
        assert values[f"{prefix}num_preemptions_total", ()] == 6
        assert values[f"{prefix}prompt_tokens_total", ()] == 9
        assert values[f"{prefix}generation_tokens_total", ()] == 5 + 1 + 1
        assert values[f"{prefix}time_to_first_token_seconds_count", ()] == 3
        assert values[f"{prefix}inter_token_latency_seconds_count", ()] == 4
        assert values[f"{prefix}e2e_request_latency_seconds_count", ()] == 2
        assert values[f"{prefix}request_queue_time_seconds_count", ()] == 3
        assert values[f"{prefix}request_time_per_output_token_seconds_count", ()] == 1
        for reason, count in (("stop", 1), ("length", 1), ("timeout", 1), ("abort", 0), ("error", 0)):
            assert values[f"{prefix}request_success_total", (("finished_reason", reason),)] == count
        config = (("block_size", "16"), ("cache_dtype", "float32"), ("num_gpu_blocks", "512"))
        assert values[f"{prefix}cache_config_info", config] == 1
    assert values["headway_iterations_total", ()] == 70
    assert values["headway_busy_seconds_total", ()] == 1.5
    assert values["headway_http_requests_rejected_total", (("status", "400"),)] == 1
    assert values["headway_engine_up", ()] == 1


async def test_every_alias_exists_and_nothing_else(connect: Any) -> None:
    async with connect(served_model_name=("m",)) as client:
        text = (await client.get("/metrics")).text
    families = {family.name for family in text_string_to_metric_families(text)}
    assert {name.removeprefix("vllm:") for name in families if name.startswith("vllm:")} == {*ALIASES.values()}
    assert {f"headway_{name}" for name in ALIASES} <= families
    assert "_created" not in text


async def test_two_servers_share_nothing(connect: Any) -> None:
    async with connect(served_model_name=("m",)) as one, connect(served_model_name=("m",)) as other:
        await one.post(PATH, json=BODY)
        assert (await _scrape(one))["headway_prompt_tokens_total", ()] == 3
        assert (await _scrape(other))["headway_prompt_tokens_total", ()] == 0


async def test_metrics_of_a_client_that_left(application: Any, engine: FakeEngine) -> None:
    import asyncio

    engine.gate = asyncio.Semaphore(0)
    async with application(served_model_name=("m",)) as app:
        call = Caller(app, PATH, {**BODY, "stream": True})
        await call.until(b"data:")
        call.leave()
        await call.done()
        text = app.state.headway.metrics.render().decode()
    assert 'headway_request_success_total{engine="0",finished_reason="abort",model_name="m"} 1.0' in text


async def test_models_version_and_openapi_are_served(connect: Any) -> None:
    async with connect(served_model_name=("m", "alias")) as client:
        models = (await client.get("/v1/models")).json()
        assert [(model["id"], model["root"], model["max_model_len"]) for model in models["data"]] == [
            ("m", "fake-model", 4096),
            ("alias", "fake-model", 4096),
        ]
        assert "version" in (await client.get("/version")).json()
        paths = (await client.get("/openapi.json")).json()["paths"]
        assert {"/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"} <= set(paths)


async def test_text_is_tokenised_and_comes_back(connect: Any) -> None:
    async with connect() as client:
        answer = (await client.post("/tokenize", json={"prompt": "hello é", "return_token_strs": True})).json()
        assert answer["tokens"][0] == 0
        assert answer["count"] == len(answer["tokens"])
        assert answer["max_model_len"] == 4096
        assert "".join(answer["token_strs"][1:4]).startswith("h")
        back = (await client.post("/detokenize", json={"tokens": answer["tokens"]})).json()
        assert back == {"prompt": "<s>hello é"}
        bare = (await client.post("/tokenize", json={"prompt": "hello é", "add_special_tokens": False})).json()
        assert bare["tokens"] == answer["tokens"][1:]
        chat = {"messages": [{"role": "user", "content": "x"}], "add_generation_prompt": False, "model": "fake-model"}
        tokens = (await client.post("/tokenize", json=chat)).json()["tokens"]
        assert (await client.post("/detokenize", json={"tokens": tokens})).json() == {"prompt": "<s>[user]x\n"}
        for path, body, param in [
            ("/tokenize", {}, "prompt"),
            ("/tokenize", {"prompt": [1]}, "prompt"),
            ("/detokenize", {"tokens": [999]}, "tokens"),
            ("/detokenize", {"tokens": "x"}, "tokens"),
            ("/detokenize", {}, "tokens"),
        ]:
            refused = await client.post(path, json=body)
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == param


async def test_one_log_line_a_request_without_the_prompt(
    connect: Any, caplog: pytest.LogCaptureFixture, engine: FakeEngine
) -> None:
    with caplog.at_level(logging.DEBUG, "headway.server"):
        async with connect() as client:
            body = {"model": "fake-model", "prompt": "my secret", "max_tokens": 3}
            await client.post(PATH, json=body, headers={"x-request-id": "r1"})
            for path in ("/health", "/ui/live.js", "/favicon.ico"):
                await client.get(path)
    lines = [record for record in caplog.records if record.getMessage() == "request"]
    assert [line.levelname for line in lines] == ["INFO", "DEBUG", "DEBUG", "DEBUG"]
    fields: dict[str, Any] = lines[0].__dict__["fields"]
    assert (fields["request_id"], fields["status"], fields["output_tokens"]) == ("r1", 200, 3)
    assert fields["finish_reason"] == "length"
    assert fields["ttft_s"] >= 0
    text, parsed = TextFormatter().format(lines[0]), json.loads(JsonFormatter().format(lines[0]))
    assert "request_id=r1" in text
    assert parsed["request_id"] == "r1"
    assert "secret" not in caplog.text + text + str(parsed)


async def test_the_openapi_description_has_the_limits_that_are_enforced(connect: Any) -> None:
    async with connect() as client:
        paths = (await client.get("/openapi.json")).json()["paths"]
        body = paths["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert body["required"] == ["model", "prompt"]
        for name, field in body["properties"].items():
            if "maximum" not in field or field["maximum"] > 2**53:  # FastAPI writes limits as floats
                continue
            most = int(field["maximum"])
            answer = await client.post("/v1/completions", json={"model": "fake-model", "prompt": "hi", name: most + 1})
            assert answer.status_code == 400, name
            assert f"at most {most}" in answer.json()["error"]["message"]


async def test_head_is_answered_where_probes_ask(connect: Any) -> None:
    async with connect() as client:
        for path in ("/", "/health", "/ready", "/version", "/metrics", "/v1/models"):
            answer = await client.head(path)
            assert (answer.status_code, answer.content) == (200, b""), path
        assert (await client.head("/v1/completions")).status_code == 405


async def test_a_target_may_name_the_host(application: Any) -> None:
    async with application() as app:
        sent: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        for host, status in ((b"localhost", 200), (b"evil.example", 403)):
            target = b"http://" + host + b"/v1/models"
            scope = {
                "type": "http", "method": "GET", "path": target.decode(), "raw_path": target, "query_string": b"",
                "headers": [(b"host", b"localhost")], "client": ("127.0.0.1", 1), "http_version": "1.1",
                "server": ("127.0.0.1", 80), "scheme": "http", "root_path": "",
            }  # fmt: skip
            sent.clear()
            await app(scope, receive, send)
            assert sent[0]["status"] == status


async def test_a_body_of_two_lengths_is_refused_and_the_connection_closed(connect: Any) -> None:
    async with connect() as client:
        both = {"content-length": "2", "transfer-encoding": "chunked"}
        answer = await client.post("/v1/completions", content=b"{}", headers=both)
    assert (answer.status_code, answer.headers["connection"]) == (400, "close")
    assert "not both" in answer.json()["error"]["message"]


async def test_metrics_are_made_at_most_twice_a_second(connect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from headway.serving import metrics

    monkeypatch.setattr(metrics, "RENDER_S", 60.0)
    made: list[int] = []
    real = metrics.generate_latest  # type: ignore[attr-defined]
    monkeypatch.setattr(metrics, "generate_latest", lambda registry: made.append(1) or real(registry))
    async with connect() as client:
        answers = [(await client.get("/metrics")).text for _ in range(5)]
    assert len(made) == len(set(answers)) == 1
