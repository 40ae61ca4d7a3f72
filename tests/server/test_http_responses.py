"""/v1/responses with the `openai` package, unchanged, against a real server on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from tests.helpers.fake_engine import FakeEngine, say

from headway.serving.tokenizer import ModelTokenizer

if TYPE_CHECKING:
    import openai

TEXT = "hello world"


@pytest.fixture
def client(engine: FakeEngine, live: Any, tokenizer: ModelTokenizer) -> Iterator[openai.OpenAI]:
    import openai

    engine.script = say(tokenizer.encode(TEXT, add_special_tokens=False))
    with (
        live(engine, api_key="secret") as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0, timeout=10) as client,
    ):
        yield client


def prompt(engine: FakeEngine, tokenizer: ModelTokenizer) -> str:
    return tokenizer.decode(engine.prompts[-1])


def test_text_in_text_out(client: openai.OpenAI, engine: FakeEngine, tokenizer: ModelTokenizer) -> None:
    answer = client.responses.create(model="fake-model", input="hi", instructions="be brief")
    assert (answer.output_text, answer.status) == (TEXT, "completed")
    assert answer.usage is not None
    assert answer.usage.output_tokens > 1
    assert prompt(engine, tokenizer) == "<s>[system]be brief\n[user]hi\n[assistant]"


def test_messages_of_parts_and_a_limit(client: openai.OpenAI, engine: FakeEngine, tokenizer: ModelTokenizer) -> None:
    given: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "one"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "two"}]},
        {"role": "user", "content": "three"},
    ]
    answer = client.responses.create(model="fake-model", input=given, max_output_tokens=1)
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert prompt(engine, tokenizer) == "<s>[user]one\n[assistant]two\n[user]three\n[assistant]"


def test_a_stream_opens_the_message_sends_its_text_and_ends_with_the_whole(client: openai.OpenAI) -> None:
    found: list[Any] = list(client.responses.create(model="fake-model", input="hi", stream=True))
    kinds = [each.type.removeprefix("response.") for each in found]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert "".join(each.delta for each in found if each.type == "response.output_text.delta") == TEXT
    assert [each.sequence_number for each in found] == list(range(len(found)))
    assert found[-1].response.output_text == TEXT
    assert found[-1].response.usage.input_tokens > 0


@pytest.mark.parametrize(
    ("more", "param", "words"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools", "vllm serve"),
        ({"text": {"format": {"type": "json_object"}}}, "text", "vllm serve"),
        ({"previous_response_id": "resp-1"}, "previous_response_id", "nothing is stored"),
        ({"input": []}, "input", "non-empty array"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input", "only messages"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "only text"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input", "role"),
        ({"max_output_tokens": 0}, "max_output_tokens", "at least 1"),
        ({"max_output_tokens": 5000}, "max_output_tokens", "maximum context length"),
    ],
)
def test_what_it_does_not_have_is_a_400_that_names_the_field(
    client: openai.OpenAI, more: dict[str, Any], param: str, words: str
) -> None:
    import openai

    with pytest.raises(openai.BadRequestError, match=words) as error:
        client.responses.create(**{"model": "fake-model", "input": "hi", **more})
    assert error.value.param == param


@pytest.mark.anyio
async def test_log_probabilities_come_with_the_text(connect: Any, engine: FakeEngine) -> None:
    body = {"model": "fake-model", "input": "hi", "max_output_tokens": 3, "include": ["message.output_text.logprobs"]}
    async with connect() as client:
        answer = (await client.post("/v1/responses", json={**body, "top_logprobs": 2})).json()
        (part,) = answer["output"][0]["content"]
        assert engine.submits[0].params.logprobs == 2
        assert len(part["logprobs"]) == answer["usage"]["output_tokens"]
        for wrong in (
            {"include": ["reasoning.encrypted_content"]},
            {"include": [], "top_logprobs": 2},
            {"text": {"verbosity": "low"}},
            {"text": {"format": {"type": "json_object"}}},
        ):
            refused = await client.post("/v1/responses", json={**body, **wrong})
            assert refused.status_code == 400, wrong
        for text in ({"verbosity": "medium"}, {"format": {"type": "text"}, "verbosity": "medium"}, {}):
            assert (await client.post("/v1/responses", json={**body, "text": text})).status_code == 200
