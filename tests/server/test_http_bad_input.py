"""Every bad input gets a 4xx with the OpenAI error object, which names the field; nothing reaches the engine."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.helpers.fake_engine import FakeEngine

from headway.serving.formats import ResponseBody
from headway.serving.request_bodies import (
    ChatBody,
    CompletionBody,
    GenerationBody,
    RequestBody,
    decode,
    read_body,
)
from headway.serving.tokenizer import ModelTokenizer

pytestmark = pytest.mark.anyio

HUGE = 10**400

USER = {"role": "user", "content": "hi"}
COMPLETION: dict[str, list[Any]] = {
    "model": [7],
    "prompt": [
        None, "", [], [[]], [""], 5, True, {"text": "a"}, [1, "a"], ["a", 1], [[1], None], [1.5], [True], [-1], [512],
        [HUGE], ["a"] * 65, [2] * 4096, [2] * 9000,
    ],
    "max_tokens": [0, -1, 1.5, "5", HUGE],
    "min_tokens": [-1, 17],
    "n": [65, 0],
    "best_of": [3],
    "temperature": [-0.1, 2.1, "hot", True, HUGE],
    "top_p": [0, 1.01],
    "top_k": [-2, 0.5],
    "min_p": [-0.1, 1.1],
    "presence_penalty": [2.5],
    "frequency_penalty": [-2.5],
    "repetition_penalty": [0],
    "logprobs": [21, -1, True],
    "stop": ["", ["a", ""], ["a"] * 17, 1, ["a" * 2000]],
    "stop_token_ids": [[512], 3, ["a"]],
    "logit_bias": [[], {"512": 1}, {"a": 1}, {"5": 101}, {"5": "x"}],
    "seed": [2**63, 1.5],
    "ignore_eos": ["yes"],
    "stream": ["true", 1],
    "stream_options": [{"include_usage": True}],
    "echo": [1],
    "prompt_logprobs": [21],
    "suffix": ["x"],
    "response_format": [{"type": "json_schema", "json_schema": {}}],
    "guided_json": [{}],
    "truncate_prompt_tokens": [5],
    "priority": ["high", HUGE],
    "slo": [5, {"refuse_late": True}],
    "timeout_s": [0, -3],
    "add_special_tokens": [1],
    "skip_special_tokens": ["no"],
    "return_token_ids": [1],
    "include_stop_str_in_output": [1],
}  # fmt: skip
"""Values of a field that are refused by its name."""
OTHER_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": [2] * 4000, "max_tokens": 97}, "max_tokens"),
    ({"n": 33, "prompt": ["a", "b"]}, "n"),
    ({"stream": True, "stream_options": 1}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"slo": {"ttft_ms": 0}}, "slo.ttft_ms"),
    ({"slo": {"ttft": 200}}, "slo.ttft"),
    ({"slo": {"ttft_ms": -5}}, "slo.ttft_ms"),
    ({"slo": {"tpot_ms": "fast"}}, "slo.tpot_ms"),
    ({"slo": {"refuse_late": 1}}, "slo.refuse_late"),
]
CHAT: dict[str, list[Any]] = {
    "messages": [None, [], "hi", [{"role": "assistant", "content": "x"}]],
    "tools": [[{"type": "function"}]],
    "tool_choice": ["required"],
    "functions": [[{}]],
    "response_format": [{"type": "json_object"}],
    "modalities": [["audio"]],
    "chat_template": ["{{ 1 }}"],
    "chat_template_kwargs": [3],
    "continue_final_message": [True],
    "logprobs": [5],
    "top_logprobs": [3],
    "max_completion_tokens": [0, 4096],
    "max_tokens": [4096],
    "min_tokens": [4096],
    "n": [129],
}
OTHER_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [USER, {"role": "robot", "content": "x"}]}, "messages[1].role"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [USER, {"role": "tool", "content": "x"}]}, "messages[1].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [USER, {"role": "assistant", "tool_calls": [{}]}]}, "messages[1].tool_calls"),
    ({"messages": [{"role": "user", "content": "xyz" * 2000}]}, "prompt"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
]


def _check(answer: Any, param: str | None, status: int = 400) -> dict[str, Any]:
    assert answer.status_code == status, (answer.request.content[:200], answer.text)
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["param"]) == (status, param)
    if param is not None:
        assert param in error["message"], error
    return dict(error)


@pytest.mark.parametrize(
    ("path", "whole", "fields", "others"),
    [
        ("/v1/completions", {"model": "fake-model", "prompt": "hi"}, COMPLETION, OTHER_COMPLETIONS),
        ("/v1/chat/completions", {"model": "fake-model", "messages": [USER]}, CHAT, OTHER_CHATS),
    ],
)
async def test_a_bad_field_is_refused_by_name(
    connect: Any, engine: FakeEngine, path: str, whole: dict[str, Any], fields: Any, others: Any
) -> None:
    single = [({name: value}, name) for name, values in fields.items() for value in values]
    async with connect() as client:
        for change, param in (*single, *others):
            _check(await client.post(path, json={**whole, **change}), param)
            assert not engine.submits, change


BROKEN: list[tuple[bytes, str | None]] = [
    (b"", None),
    (b"{", None),
    (b"[]", None),
    (b'"text"', None),
    (b"null", None),
    (b"{'model': 1}", None),
    (b'{"model":"fake-model","prompt":"hi"} more', "prompt"),
    (b'{"model":"fake-model","prompt":"hi","temperature":NaN}', "temperature"),
    (b'{"model":"fake-model","prompt":"hi","top_p":Infinity}', "top_p"),
    (b'{"model":"fake-model","prompt":"hi","temperature":-Infinity}', "temperature"),
    (b'{"model":"fake-model","prompt":"hi","temperature":1e999}', "temperature"),
    (b'{"model":"fake-model","prompt":"hi","max_tokens":1e999}', "max_tokens"),
    (b'{"model":"fake-model","prompt":"\xff\xfe"}', "prompt"),
    (b'{"model":"fake-model","prompt":"\xed\xa0\x80"}', "prompt"),
    (b'{"model":"fake-model","prompt":"\\ud800"}', "prompt"),
    (b'{"model":"fake-model","prompt":"\\ud800x"}', "prompt"),
    (b'{"model":"fake-model","prompt":"\\udc00"}', "prompt"),
    (b'{"model":"fake-model","prompt":"hi","stop":["\\ud800 "]}', "stop"),
    (b'{"model":"fake-model","prompt":"hi","slo":' + b"[" * 100_000 + b"]" * 100_000 + b"}", None),
    (b'{"model":"fake-model","prompt":' + b"[" * 5000 + b"]" * 5000 + b"}", None),
    (b'{"model":"fake-model","prompt":[1,2', "prompt"),
    (b'{"model":"fake-model","prompt":[1,2,]}', "prompt"),
]


async def test_a_body_that_is_broken_json_is_refused_in_few_words(connect: Any, engine: FakeEngine) -> None:
    async with connect() as client:
        for body, param in BROKEN:
            answer = await client.post("/v1/completions", content=body)
            error = _check(answer, answer.json()["error"]["param"] if param is None else param)
            assert len(error["message"]) < 300, body[:60]
            assert not engine.submits, body[:60]


async def test_models_missing_and_unknown(connect: Any) -> None:
    async with connect() as client:
        _check(await client.post("/v1/completions", json={"prompt": "hi"}), "model")
        _check(await client.post("/v1/completions", json={"model": "gpt-4", "prompt": "hi"}), "model", 404)
        _check(await client.post("/v1/chat/completions", json={"model": "", "messages": [USER]}), "model", 404)


async def test_kv_pool_smaller_than_the_context(connect: Any, engine: FakeEngine) -> None:
    engine.info_value = msgspec.structs.replace(engine.info_value, kv_tokens_total=100)
    async with connect() as client:
        body = {"model": "fake-model", "prompt": [2] * 100}
        assert "KV pool" in _check(await client.post("/v1/completions", json=body), "prompt")["message"]
        body = {"model": "fake-model", "prompt": [2] * 50, "max_tokens": 51}
        assert "KV pool" in _check(await client.post("/v1/completions", json=body), "max_tokens")["message"]
        body = {"model": "fake-model", "messages": [USER]}
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    assert engine.submits[0].params.max_tokens == 100 - engine.submits[0].prompt_tokens


API_FIELDS = (
    "metadata", "store", "service_tier", "parallel_tool_calls", "reasoning", "reasoning_effort", "verbosity",
    "prediction", "prompt_cache_key", "safety_identifier", "web_search_options", "max_tool_calls", "length_penalty",
    "allowed_token_ids", "bad_words", "logits_processors", "request_id", "kv_transfer_params", "documents",
)  # fmt: skip
"""Fields of OpenAI's and vLLM's bodies that none of the models has."""
NULLED: list[tuple[str, type[RequestBody], dict[str, Any], dict[str, Any]]] = [
    ("/v1/completions", CompletionBody, {"prompt": "hi"}, {"response_format": {"type": "text", "json_schema": None}}),
    (
        "/v1/chat/completions",
        ChatBody,
        {"messages": [USER]},
        {
            "messages": [{**USER, "name": None, "tool_calls": None, "function_call": None, "audio": None}],
            "response_format": {"type": "text", "json_schema": None},
            "slo": {"ttft_ms": None, "tpot_ms": None, "refuse_late": None},
        },
    ),
    (
        "/v1/responses",
        ResponseBody,
        {"input": "hi"},
        {
            "input": [{"type": None, "id": None, "status": None, "role": "user", "content": "hi"}],
            "text": {"format": {"type": "text", "name": None, "schema": None}, "verbosity": None},
            "reasoning": {"effort": None, "summary": None},
        },
    ),
]


@pytest.mark.parametrize(("path", "body", "given", "nested"), NULLED)
async def test_null_means_absent_in_each_field_of_a_body(
    connect: Any, engine: FakeEngine, path: str, body: type[RequestBody], given: dict[str, Any], nested: dict[str, Any]
) -> None:
    given = {"model": "fake-model", **given}
    own = {field.alias or name for name, field in body.model_fields.items()}
    names = sorted({*own, *body.unsupported, *GenerationBody.model_fields, *API_FIELDS, "class"} - given.keys())
    for name in names:
        found = read_body(body, decode(msgspec.json.encode({**given, name: None})))
        assert found == read_body(body, given), name
        assert found.model_fields_set == given.keys(), name
    async with connect() as client:
        for each in ({}, dict.fromkeys(names), nested):
            answer = await client.post(path, json={**given, **each})
            assert answer.status_code == 200, (each, answer.text)
        for name in given:
            without = {key: value for key, value in given.items() if key != name}
            refused = [await client.post(path, json=each) for each in (without, {**given, name: None})]
            assert [each.status_code for each in refused] == [400, 400]
            assert refused[0].json() == refused[1].json()
    first, *others = (msgspec.structs.replace(each.params, seed=0) for each in engine.submits)
    assert others == [first, first]
    assert len({tuple(each) for each in engine.prompts}) == 1


async def test_unknown_fields_are_ignored(connect: Any) -> None:
    body = {"model": "fake-model", "prompt": "hi", "max_tokens": 2, "user": "me", "frobnicate": {"a": [1]}}
    async with connect() as client:
        assert (await client.post("/v1/completions", json=body)).status_code == 200


async def test_parameters_reach_the_engine(connect: Any, engine: FakeEngine) -> None:
    given = {
        "max_tokens": 7, "min_tokens": 2, "temperature": 0, "top_p": 0.5, "top_k": -1, "min_p": 0.1, "seed": -5,
        "presence_penalty": -2, "frequency_penalty": 2, "repetition_penalty": 1.5, "logit_bias": {"5": -100},
        "logprobs": 0, "ignore_eos": True, "stop_token_ids": [4, 5],
    }  # fmt: skip
    async with connect(request_timeout_s=20.0) as client:
        body = {"model": "fake-model", "prompt": "hi", "priority": -3, "timeout_s": 50, **given}
        assert (await client.post("/v1/completions", json=body)).status_code == 200
    submit = engine.submits[0]
    expected = {**given, "top_k": 0, "logit_bias": {5: -100.0}, "stop_token_ids": (4, 5)}
    assert {name: getattr(submit.params, name) for name in expected} == expected
    assert submit.priority == -3
    assert submit.timeout_s == 20.0


async def test_without_a_tokenizer_only_ids_are_served(connect: Any) -> None:
    async with connect(ModelTokenizer.none()) as client:
        _check(await client.post("/v1/completions", json={"model": "fake-model", "prompt": "hi"}), "prompt")
        body = {"model": "fake-model", "messages": [USER]}
        error = _check(await client.post("/v1/chat/completions", json=body), "messages")
        assert "no tokenizer" in error["message"]


async def test_wrong_paths_and_methods(connect: Any) -> None:
    async with connect() as client:
        _check(await client.get("/v2/completions"), None, 404)
        _check(await client.get("/v1/completions"), None, 405)
