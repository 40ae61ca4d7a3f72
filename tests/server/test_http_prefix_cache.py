"""The prefix cache as clients and operators see it: usage, salts, opting out, metrics, the log line."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from typing import Any

import pytest
from tests.helpers.fake_engine import FakeEngine

from headway.core.errors import ConfigError
from headway.core.settings import resolve
from headway.runtime.engine.protocol import EngineStats, OutputDelta, SubmitRequest
from headway.serving.serve_settings import ServeSettings

pytestmark = pytest.mark.anyio

CHAT = {"model": "fake-model", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
TEXT = {"model": "fake-model", "prompt": [2, 3, 4], "max_tokens": 2}
RESPONSE = {"model": "fake-model", "input": "hi", "max_output_tokens": 2}


def half_cached(submit: SubmitRequest, ids: list[int]) -> Iterable[OutputDelta]:
    yield OutputDelta(id=submit.id, tokens=(5,), cached_tokens=submit.prompt_tokens // 2, saved_s=0.25)
    yield OutputDelta(id=submit.id, tokens=(6,), finish="length")


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(script=half_cached)


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)])
async def test_usage_counts_cached_tokens_streamed_or_not(connect: Any, path: str, body: dict[str, Any]) -> None:
    async with connect() as client:
        whole = (await client.post(path, json=body)).json()["usage"]
        stream = {**body, "stream": True, "stream_options": {"include_usage": True}}
        events = (await client.post(path, json=stream)).text.split("\n\n")
    last = json.loads(events[-3].removeprefix("data: "))["usage"]
    assert whole == last
    assert whole["prompt_tokens_details"] == {"cached_tokens": whole["prompt_tokens"] // 2}


async def test_usage_of_a_response_counts_cached_tokens(connect: Any) -> None:
    async with connect() as client:
        usage = (await client.post("/v1/responses", json=RESPONSE)).json()["usage"]
    assert usage["input_tokens_details"] == {"cached_tokens": usage["input_tokens"] // 2}


async def test_choices_of_one_prompt_count_its_cached_tokens_once(connect: Any) -> None:
    async with connect() as client:
        usage = (await client.post("/v1/completions", json={**TEXT, "n": 3})).json()["usage"]
    assert (usage["prompt_tokens"], usage["prompt_tokens_details"]) == (3, {"cached_tokens": 1})


async def test_salts_of_different_keys_differ(connect: Any, engine: FakeEngine) -> None:
    async with connect(api_key="one,two") as client:
        for key in ("one", "two"):
            for salt in (None, "s"):
                body = {**CHAT, "cache_salt": salt}
                await client.post("/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"})
        assert len({submit.cache_salt for submit in engine.submits}) == 4


async def test_a_response_passes_salt_and_opting_out_on(connect: Any, engine: FakeEngine) -> None:
    async with connect() as client:
        await client.post("/v1/responses", json={**RESPONSE, "cache_salt": "s", "cache_prompt": False})
        await client.post("/v1/responses", json=RESPONSE)
    first, second = engine.submits
    assert (first.cache_salt, first.prefix_cache) == ("/s", False)
    assert (second.cache_salt, second.prefix_cache) == ("/", True)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("cache_salt", 7, "'cache_salt' must be a string, not an integer"),
        ("cache_salt", "", "'cache_salt' must have 1 to 1024 characters, not 0"),
        ("cache_prompt", "no", "'cache_prompt' must be true or false, not a string"),
    ],
)
async def test_a_salt_of_the_wrong_type_is_refused(connect: Any, field: str, value: object, words: str) -> None:
    async with connect() as client:
        answer = await client.post("/v1/chat/completions", json={**CHAT, field: value})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == words


async def test_metrics_show_queries_and_hits(connect: Any, engine: FakeEngine) -> None:
    engine.stats = EngineStats(prefix_queries_total=100, prefix_hits_total=75, kv_tokens_cached=64)
    async with connect(served_model_name=("m",)) as client:
        lines = (await client.get("/metrics")).text.splitlines()
    for prefix in ("headway_", "vllm:"):
        assert f'{prefix}prefix_cache_queries_total{{engine="0",model_name="m"}} 100.0' in lines
        assert f'{prefix}prefix_cache_hits_total{{engine="0",model_name="m"}} 75.0' in lines
    assert 'headway_kv_tokens_cached{engine="0",model_name="m"} 64.0' in lines


async def test_the_log_line_splits_the_time_to_first_token(connect: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "headway.server"):
        async with connect() as client:
            await client.post("/v1/completions", json=TEXT)
    (line,) = [record for record in caplog.records if record.getMessage() == "request"]
    fields: dict[str, Any] = line.fields  # type: ignore[attr-defined]
    assert fields["queue_s"] + fields["computed_s"] == pytest.approx(fields["ttft_s"], abs=1e-5)
    assert (fields["cached_tokens"], fields["cached_saved_s"]) == (1, 0.25)


def _config(**values: str) -> bool:
    return resolve(ServeSettings, flags=values).engine_config("m").prefix_cache


def test_prefixes_are_cached_where_that_is_possible() -> None:
    assert _config()
    assert not _config(prefix_cache="false")
    assert _config(tensor_parallel_size="2", pipeline_parallel_size="2")
    assert not _config(kv_parallel_size="2")
    assert not _config(event_log="log.jsonl")
    with pytest.raises(ConfigError, match="prefix-cache needs an engine without KV groups"):
        _config(prefix_cache="true", kv_parallel_size="2")
