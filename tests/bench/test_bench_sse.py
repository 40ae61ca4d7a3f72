from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.sse import SseEvent, SseParser
from headway.serving.load.client import LoadRequest, StreamedAnswer

STREAM = (
    b': hello\n\ndata: {"a": 1}\r\n\r\n'
    b"event: error\ndata: x\ndata: y\nid: 4\n\nevent: empty\n\ndata:[DONE]\n\ndata: cut off"
)
EVENTS = [SseEvent("message", b'{"a": 1}'), SseEvent("error", b"x\ny"), SseEvent("message", b"[DONE]")]


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_events_are_the_same_however_the_bytes_are_cut(cuts: list[int]) -> None:
    parser, edges = SseParser(), [0, *sorted(cuts), len(STREAM)]
    events = [event for i in range(len(edges) - 1) for event in parser.feed(STREAM[edges[i] : edges[i + 1]])]
    assert events == EVENTS


def collect(*chunks: bytes) -> StreamedAnswer:
    answer = StreamedAnswer()
    for number, chunk in enumerate(chunks):
        answer.take(SseEvent("message", chunk), float(number))
    return answer


def record(answer: StreamedAnswer):  # type: ignore[no-untyped-def]
    job = LoadRequest(id="a", prompt=b"[]", prompt_tokens=3, output_tokens=4)
    return answer.record(job, sent_s=0.0, finish_s=9.0, error=answer.verdict())


def test_tokens_are_counted_by_usage_first() -> None:
    got = record(
        collect(
            b'{"choices":[{"text":"","finish_reason":null}],"usage":{"completion_tokens":1}}',
            b'{"choices":[{"text":"abc","finish_reason":"length"}],"usage":{"prompt_tokens":5,"completion_tokens":4}}',
            b"[DONE]",
        )
    )
    assert got.ok
    assert got.token_s == (0.0, 1.0, 1.0, 1.0)
    assert (got.prompt_tokens, got.output_tokens) == (5, 4)


def test_without_usage_by_ids_else_one_a_chunk() -> None:
    got = record(
        collect(
            b'{"choices":[{"text":"ab","token_ids":[1,2]}]}',
            b'{"choices":[{"text":"c"}]}',
            b'{"choices":[{"text":"","finish_reason":"stop"}]}',
        )
    )
    assert got.token_s == (0.0, 0.0, 1.0)


def test_tokens_counted_only_by_the_last_usage_get_the_time_of_the_last_chunk() -> None:
    got = record(
        collect(
            b'{"choices":[{"text":"a"}]}',
            b'{"choices":[{"text":"","finish_reason":"length"}]}',
            b'{"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":3}}',
        )
    )
    assert got.token_s == (0.0, 1.0, 1.0)


def test_chat_chunks_are_understood() -> None:
    got = record(
        collect(
            b'{"choices":[{"delta":{"role":"assistant","content":""}}]}',
            b'{"choices":[{"delta":{"content":"hi"}}]}',
            b'{"choices":[{"delta":{},"finish_reason":"stop"}]}',
        )
    )
    assert got.token_s == (1.0,)


@pytest.mark.parametrize(
    ("chunks", "error"),
    [
        ([], "stream ended early"),
        ([b'{"choices":[{"text":"a"}]}'], "stream ended early"),
        ([b"[DONE]"], "no output token"),
        ([b"{torn"], "bad chunk"),
        ([b"[1]"], "bad chunk"),
        ([b'{"error":{"message":"worker lost"}}'], "error event: worker lost"),
        ([b'{"error":"plain words"}'], "error event: plain words"),
        ([b'{"choices":[{"text":"a","finish_reason":"abort"}]}'], "finished by abort"),
    ],
)
def test_a_faulty_answer_has_an_error(chunks: list[bytes], error: str) -> None:
    got = record(collect(*chunks))
    assert not got.ok
    assert got.error is not None
    assert got.error.startswith(error)
