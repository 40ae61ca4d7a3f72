"""One answer over several streams: each goes on after the tokens so far, or repeats them, and the client gets them
once."""

from __future__ import annotations

from array import array
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import InvariantError
from headway.core.request import SamplingParams
from headway.runtime.cluster.http_server import AnswerStream, completion_body
from headway.runtime.cluster.requests import ClusterRequest
from headway.runtime.engine.protocol import OutputDelta, SubmitRequest

ANSWER = tuple(range(100, 140))
"""What any instance answers."""


def request(output: int, before: tuple[int, ...] = (), **params: Any) -> ClusterRequest:
    sampling = SamplingParams(max_tokens=output, **params)
    submit = SubmitRequest(id="r", prompt_tokens=1, params=sampling, received_s=0.0, output=before)
    return ClusterRequest(submit, array("i", [7]).tobytes())


def stream(output: int) -> AnswerStream:
    return AnswerStream(cast(Any, None), 0.0, None, output)


def say(asked: ClusterRequest, at: AnswerStream, tokens: tuple[int, ...]) -> tuple[int, ...]:
    new = at.take(asked, tokens)
    asked.tell(OutputDelta(id="r", tokens=new))
    return new


@given(st.lists(st.sampled_from((0, 1, 3)), max_size=60), st.booleans(), st.integers(0, 5))
def test_whenever_streams_break_off_the_client_has_a_prefix_of_the_one_answer(
    pieces: list[int], anew: bool, before: int
) -> None:
    """0: the stream breaks off, and another one begins."""
    asked = request(30, ANSWER[:before])
    client = list(ANSWER[:before])
    at = 0 if anew else before
    one = stream(at)
    for count in pieces:
        if not count:
            at = 0 if anew else len(asked.told)
            one = stream(at)
        tokens = ANSWER[at : min(at + count, 30)]
        client += say(asked, one, tokens)
        at += len(tokens)
        assert asked.told == client == list(ANSWER[: len(client)])


def test_another_stream_asks_for_the_rest_of_the_answer() -> None:
    asked = request(10, (1, 2, 3), min_tokens=5)
    body = completion_body(asked.submit, asked.prompt, "m", asked.told)
    assert (body["prompt"], body["max_tokens"], body["min_tokens"]) == ([7, 1, 2, 3], 7, 2)


def test_a_stream_that_begins_anew_brings_only_what_is_new_and_another_answer_is_noticed() -> None:
    asked = request(10)
    assert say(asked, stream(0), (1, 2, 3)) == (1, 2, 3)
    again = stream(0)
    assert say(asked, again, (1, 2)) == ()
    assert say(asked, again, (3, 4)) == (4,)
    with pytest.raises(InvariantError, match="differs"):
        stream(0).take(asked, (1, 9))


def test_more_tokens_than_were_wanted_are_an_error() -> None:
    with pytest.raises(InvariantError, match="more than the 2"):
        stream(0).take(request(2), (1, 2, 3))
