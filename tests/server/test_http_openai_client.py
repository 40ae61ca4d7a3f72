"""The `openai` package, unchanged, against a real server on loopback."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from tests.helpers.fake_engine import FakeEngine, fail, say
from tests.helpers.polling import until

from headway.core.errors import OverloadedError, UnavailableError
from headway.serving.tokenizer import ModelTokenizer

if TYPE_CHECKING:
    import openai

MESSAGES: Any = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
TEXT = "hello wörld 😀 bye"


@pytest.fixture
def address(engine: FakeEngine, live: Any) -> Iterator[str]:
    with live(engine, api_key="secret", keep_alive_s=0.02) as url:
        yield url


@pytest.fixture
def client(address: str) -> openai.OpenAI:
    import openai

    return openai.OpenAI(base_url=f"{address}/v1", api_key="secret", max_retries=0, timeout=10)


@pytest.fixture
def speaks(engine: FakeEngine, tokenizer: ModelTokenizer) -> list[int]:
    """Make the engine answer `TEXT`, tokenised character by character; return its token ids."""
    tokens = [token for char in TEXT for token in tokenizer.encode(char, add_special_tokens=False)]
    engine.script = say(tokens)
    return tokens


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake-model"]


def test_a_completion_ends_at_its_stop_or_its_length(client: openai.OpenAI, speaks: list[int]) -> None:
    answer = client.completions.create(model="fake-model", prompt="hi", max_tokens=100)
    assert answer.object == "text_completion"
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (TEXT, "stop")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(speaks)
    cut = client.completions.create(model="fake-model", prompt="hi", max_tokens=5)
    assert (cut.choices[0].text, cut.choices[0].finish_reason) == ("hello", "length")


def test_a_streamed_completion_has_the_same_text_and_usage(client: openai.OpenAI, speaks: list[int]) -> None:
    stream = client.completions.create(
        model="fake-model", prompt="hi", max_tokens=100, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == TEXT
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(speaks)
    assert chunks[-2].choices[0].finish_reason == "stop"


def test_a_completion_has_the_asked_log_probabilities(client: openai.OpenAI, speaks: list[int]) -> None:
    answer = client.completions.create(model="fake-model", prompt="hi", max_tokens=5, logprobs=2)
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.tokens == list("hello")
    assert found.text_offset == [0, 1, 2, 3, 4]
    assert found.token_logprobs == [-0.5] * 5
    assert found.top_logprobs is not None
    assert found.top_logprobs[0]["h"] == -0.5


def test_a_chat_is_answered_through_its_template(
    client: openai.OpenAI, engine: FakeEngine, tokenizer: ModelTokenizer, speaks: list[int]
) -> None:
    answer = client.chat.completions.create(model="fake-model", messages=MESSAGES)
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].message.role == "assistant"
    assert tokenizer.decode(engine.prompts[0]) == "<s>[system]be brief\n[user]hello\n[assistant]"
    assert engine.submits[0].params.max_tokens == 4096 - engine.submits[0].prompt_tokens


def test_a_streamed_chat_has_the_same_text_and_usage(client: openai.OpenAI, speaks: list[int]) -> None:
    stream = client.chat.completions.create(
        model="fake-model", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == TEXT
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(speaks)


def test_a_chat_has_the_asked_log_probabilities(client: openai.OpenAI, speaks: list[int]) -> None:
    answer = client.chat.completions.create(
        model="fake-model", messages=MESSAGES, max_completion_tokens=8, logprobs=True, top_logprobs=2
    )
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.content is not None
    assert bytes(byte for entry in found.content for byte in entry.bytes or []) == "hello wö".encode()[:8]
    assert [len(entry.top_logprobs) for entry in found.content] == [2] * 8


def test_async_chat_parts_and_extras(client: openai.OpenAI, engine: FakeEngine, speaks: list[int]) -> None:
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]}]
    answer = client.chat.completions.create(
        model="fake-model", messages=parts, max_tokens=2, seed=7, user="me",
        extra_body={"priority": -1, "top_k": 5, "return_token_ids": True, "slo": {"ttft_ms": 500}},
        extra_headers={"X-Request-Id": "mine"},
    )  # fmt: skip
    submit = engine.submits[0]
    assert (submit.priority, submit.params.top_k, submit.params.seed, submit.slo.ttft_s) == (-1, 5, 7, 0.5)
    assert answer.id == "chatcmpl-mine"
    assert answer._request_id == "mine"
    assert answer.choices[0].model_dump()["token_ids"] == speaks[:2]


def _refusing(error: Exception) -> Callable[[openai.OpenAI, FakeEngine], object]:
    def call(client: openai.OpenAI, engine: FakeEngine) -> object:
        engine.refuse = error
        return client.completions.create(model="fake-model", prompt="hi")

    return call


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda c, e: c.completions.create(model="fake-model", prompt="hi", temperature=9), "BadRequestError"),
        (lambda c, e: c.completions.create(model="other", prompt="hi"), "NotFoundError"),
        (lambda c, e: c.with_options(api_key="wrong").models.list(), "AuthenticationError"),
        (_refusing(OverloadedError("full")), "RateLimitError"),
        (_refusing(UnavailableError("draining")), "InternalServerError"),
    ],
)
def test_errors_are_those_that_openai_clients_raise(
    client: openai.OpenAI, engine: FakeEngine, call: Any, expected: str
) -> None:
    import openai

    with pytest.raises(openai.APIStatusError) as caught:
        call(client, engine)
    assert type(caught.value).__name__ == expected
    assert isinstance(caught.value.body, dict)
    assert {"message", "type", "param", "code"} <= set(caught.value.body)


def test_an_error_in_mid_stream_reaches_the_client(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.script = fail("error", after=[5, 6], error="worker died")
    stream = client.completions.create(model="fake-model", prompt="hi", stream=True)
    import openai

    with pytest.raises(openai.APIError, match="worker died"):
        list(stream)


def test_retry_after_is_obeyed(client: openai.OpenAI, engine: FakeEngine, speaks: list[int]) -> None:
    engine.refuse = OverloadedError("full", 0.1)
    threading.Timer(0.3, lambda: setattr(engine, "refuse", None)).start()
    answer = client.with_options(max_retries=2).completions.create(model="fake-model", prompt="hi", max_tokens=5)
    assert answer.choices[0].text == "hello"


@pytest.mark.parametrize("stream", [True, False])
def test_a_dropped_connection_aborts_its_request(address: str, engine: FakeEngine, stream: bool) -> None:
    engine.delay_s = 0.02
    body = json.dumps({"model": "fake-model", "prompt": [2], "max_tokens": 4000, "stream": stream})
    connection = http.client.HTTPConnection(address.removeprefix("http://"))
    connection.request("POST", "/v1/completions", body, {"Authorization": "Bearer secret"})
    until(lambda: engine.sent > 2)
    assert connection.sock is not None
    connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()
    until(lambda: engine.aborted)


def test_large_body_on_a_real_socket(engine: FakeEngine, live: Any) -> None:
    with live(engine, max_body_bytes=1 << 20) as url:
        connection = http.client.HTTPConnection(url.removeprefix("http://"))
        connection.putrequest("POST", "/v1/completions")
        connection.putheader("Content-Length", str(1 << 40))
        connection.endheaders(b"{")
        answer = connection.getresponse()
        assert answer.status == 413
        assert json.loads(answer.read())["error"]["code"] == 413
        assert answer.headers["connection"] == "close"


def test_slow_reader_on_a_real_socket(engine: FakeEngine, live: Any) -> None:
    many = 100_000  # more than what the kernel's own buffers take
    engine.info_value = msgspec.structs.replace(engine.info_value, max_model_len=2 * many, kv_tokens_total=2 * many)
    given = {"model": "fake-model", "prompt": [2], "max_tokens": many, "stream": True, "logprobs": 20}
    body = json.dumps(given).encode()
    with live(engine, slow_client_timeout_s=0.3) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect((host, int(port)))
            sock.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body
            )
            until(lambda: engine.aborted, 20)
            assert engine.sent < many
