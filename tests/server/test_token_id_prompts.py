"""Arrays of token ids: the ids themselves, or the first item that is none."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.errors import RequestError
from headway.runtime.embedded import model_path
from headway.serving.jobs import PromptReader
from headway.serving.request_bodies import decode
from headway.serving.tokenizer import ModelTokenizer

VOCAB = 1000
TOKENIZER = ModelTokenizer.load(Path(model_path()))


def read(text: str) -> list[int] | str:
    try:
        fields = decode(b'{"prompt": %b, "x": 1}' % text.encode())
        (prompt,) = PromptReader(TOKENIZER, VOCAB, 4).read(fields["prompt"], add_special_tokens=True)
    except RequestError as error:
        return str(error)
    return array("i", prompt.data.tobytes()).tolist()


@settings(max_examples=60, derandomize=True)
@given(ids=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=60), space=st.sampled_from([",", ", ", " ,\n "]))
def test_ids_are_read(ids: list[int], space: str) -> None:
    assert read(f"[ {space.join(map(str, ids))} ]") == ids


@settings(max_examples=120, derandomize=True)
@given(
    before=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5),
    wrong=st.sampled_from([-1, VOCAB, 1.5, True, None, "a,1", "],[", [1, 2], {"a": [1, 2]}, 10**30, -(10**15)]),
    after=st.lists(st.integers(-3, VOCAB + 3), max_size=5),
)
def test_the_first_item_that_is_no_id_is_named(before: list[int], wrong: Any, after: list[int]) -> None:
    said = str(read(json.dumps([*before, wrong, *after])))
    assert said == f"'prompt' at [{len(before)}] must be a token id in 0..{VOCAB - 1}"


@pytest.mark.parametrize("text", ["[1,]", "[,1]", "[1,,2]", "[1 2]", "[1,2", "[01]", "[1],2]"])
def test_malformed_json_is_refused(text: str) -> None:
    assert "not valid JSON" in str(read(text))
