"""Several choices, the prompt before the answer, counts in chunks, over-long prompts, pages of other origins."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest
from msgspec.structs import replace
from tests.helpers.fake_engine import INFO, FakeEngine, say

from headway.core.request import TokenLogprobs
from headway.runtime.engine.protocol import OutputDelta, SubmitRequest

pytestmark = pytest.mark.anyio

PATH = "/v1/completions"
BODY: dict[str, Any] = {"model": "m", "prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0}


def scored(submit: SubmitRequest, ids: list[int]) -> Iterable[OutputDelta]:
    """One token, with scores of the prompt that are the token ids below zero."""
    scores = tuple(TokenLogprobs(-float(token), ((token, -float(token)), (3, -0.5))) for token in ids[1:])
    wanted = submit.params.prompt_logprobs is not None
    yield OutputDelta(
        id=submit.id, tokens=(9,), finish="length", logprobs=(TokenLogprobs(-0.25, ((9, -0.25),)),),
        prompt_logprobs=scores if wanted else None,
    )  # fmt: skip


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


@pytest.fixture
def whole(engine: FakeEngine) -> FakeEngine:
    """An engine of one worker that scores prompts."""
    engine.info_value = replace(INFO, layout="tp1-pp1-kvp1")
    engine.script = scored
    return engine


async def test_n_choices_have_seeds_of_their_own_and_the_prompt_counts_once(connect: Any, engine: FakeEngine) -> None:
    async with connect(served_model_name=("m",)) as client:
        answer = (await client.post(PATH, json={**BODY, "prompt": [[5, 6], [7]], "n": 2, "seed": 40})).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert sorted((tuple(ids), s.params.seed) for ids, s in zip(engine.prompts, engine.submits, strict=True)) == [
        ((5, 6), 40), ((5, 6), 41), ((7,), 40), ((7,), 41),
    ]  # fmt: skip
    assert answer["usage"]["prompt_tokens"] == 3


async def test_each_choice_of_a_streamed_chat_opens_with_its_role(connect: Any, engine: FakeEngine) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "n": 2, "stream": True, "max_tokens": 3}
    async with connect(served_model_name=("m",)) as client:
        found = events((await client.post("/v1/chat/completions", json=body)).text)
    opened = [choice["index"] for each in found for choice in each["choices"] if "role" in choice["delta"]]
    assert sorted(opened) == [0, 1]


async def test_echo_puts_the_prompt_and_its_scores_before_the_answer(connect: Any, whole: FakeEngine, ids: Any) -> None:
    prompt = ids("hello wörld")
    async with connect(served_model_name=("m",)) as client:
        body = {**BODY, "prompt": prompt, "max_tokens": 1, "echo": True, "logprobs": 1}
        (choice,) = (await client.post(PATH, json=body)).json()["choices"]
        (plain,) = (await client.post(PATH, json={**body, "logprobs": None})).json()["choices"]
        streamed = events((await client.post(PATH, json={**body, "stream": True})).text)
    logprobs = choice["logprobs"]
    assert choice["text"].startswith("hello wörld")
    assert logprobs["token_logprobs"] == [None, *(-float(token) for token in prompt[1:]), -0.25]
    assert logprobs["top_logprobs"][0] is None
    assert len(logprobs["top_logprobs"][1]) == 2
    # The offsets of the answer go on behind the prompt's.
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
    assert logprobs["text_offset"][-1] == len("hello wörld")
    assert (plain["text"], plain["logprobs"]) == (choice["text"], None)
    assert "".join(each["choices"][0]["text"] for each in streamed) == choice["text"]
    joined = [value for each in streamed for value in each["choices"][0]["logprobs"]["token_logprobs"]]
    assert joined == logprobs["token_logprobs"]


async def test_max_tokens_0_answers_with_the_prompt_and_its_scores_alone(
    connect: Any, whole: FakeEngine, ids: Any
) -> None:
    prompt = ids("hello wörld")
    body = {**BODY, "prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 1}
    async with connect(served_model_name=("m",)) as client:
        answer = (await client.post(PATH, json=body)).json()
        options = {"stream": True, "stream_options": {"include_usage": True}}
        streamed = events((await client.post(PATH, json={**body, **options})).text)
        nothing = (await client.post(PATH, json={**BODY, "max_tokens": 0})).json()["error"]
        chat = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 0}
        refused = (await client.post("/v1/chat/completions", json=chat)).json()["error"]
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("hello wörld", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, *(-float(token) for token in prompt[1:])]
    assert answer["usage"]["completion_tokens"] == 0
    assert "".join(each["choices"][0]["text"] for each in streamed[:-1]) == "hello wörld"
    assert streamed[-1]["usage"] == answer["usage"]
    assert (nothing["param"], refused["param"]) == ("max_tokens", "max_tokens")
    assert "needs 'echo' or 'prompt_logprobs'" in nothing["message"]


async def test_prompt_logprobs_are_a_field_of_their_own_without_echo(connect: Any, whole: FakeEngine) -> None:
    async with connect(served_model_name=("m",)) as client:
        (choice,) = (await client.post(PATH, json={**BODY, "prompt_logprobs": 1})).json()["choices"]
    assert choice["prompt_logprobs"][0] is None
    assert choice["prompt_logprobs"][1]["6"]["logprob"] == -6.0
    assert choice["prompt_logprobs"][2]["3"]["logprob"] == -0.5
    assert choice["logprobs"] is None


async def test_scores_of_prompts_are_refused_where_they_cannot_be_had(
    connect: Any, engine: FakeEngine, whole: FakeEngine, tmp_path: Any
) -> None:
    body = {**BODY, "echo": True, "logprobs": 1}
    async with connect(served_model_name=("m",), journal=str(tmp_path / "j")) as client:
        answer = (await client.post(PATH, json=body)).json()["error"]
        assert "with a journal" in answer["message"]
    engine.info_value = replace(INFO, layout="tp2-pp1-kvp1")
    async with connect(served_model_name=("m",)) as client:
        answer = (await client.post(PATH, json={**BODY, "prompt_logprobs": 2})).json()["error"]
    assert (answer["param"], answer["code"]) == ("prompt_logprobs", 400)
    assert "an engine of one worker" in answer["message"]


async def test_counts_may_be_in_every_chunk(connect: Any, engine: FakeEngine) -> None:
    engine.script = say([5, 6, 7])
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with connect(served_model_name=("m",)) as client:
        found = events((await client.post(PATH, json={**BODY, "stream": True, "stream_options": options})).text)
    assert [each["usage"]["completion_tokens"] for each in found] == [1, 2, 3, 3, 3]
    assert {each["usage"]["prompt_tokens"] for each in found} == {3}


@pytest.mark.parametrize("size", [4096, 4090])
async def test_an_over_long_request_is_refused_in_the_words_that_clients_look_for(connect: Any, size: int) -> None:
    async with connect(served_model_name=("m",)) as client:
        answer = await client.post(PATH, json={**BODY, "prompt": [5] * size, "max_tokens": 16})
    total = size + 16 if size < 4096 else size + 1
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert message.startswith(
        f"This model's maximum context length is 4096 tokens. However, you requested {total} tokens"
    )


@pytest.mark.parametrize(
    "more",
    [
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"response_format": {"type": "json_object"}},
    ],
)
async def test_tools_and_structure_are_refused_with_the_engine_that_has_them(connect: Any, more: Any) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **more}
    async with connect(served_model_name=("m",)) as client:
        answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert "vllm serve" in answer.json()["error"]["message"]


async def test_one_model_by_name_also_with_slashes(connect: Any) -> None:
    async with connect(served_model_name=("org/m", "b")) as client:
        assert (await client.get("/v1/models/org/m")).json()["id"] == "org/m"
        assert (await client.get("/v1/models/c")).status_code == 404


async def test_other_origins_are_allowed_by_setting_only(connect: Any) -> None:
    origin = {"origin": "https://page.example"}
    ask = {**origin, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    async with connect(api_key="k") as client:
        assert "access-control-allow-origin" not in (await client.get("/health", headers=origin)).headers
    async with connect(api_key="k", allowed_origins='["https://page.example"]') as client:
        # A browser asks first, without the key.
        allowed = await client.options(PATH, headers=ask)
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == "https://page.example"
        other = await client.get("/health", headers={"origin": "https://other.example"})
        assert "access-control-allow-origin" not in other.headers
