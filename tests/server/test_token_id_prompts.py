"""Arrays of token ids, decoded in pieces: the same ids and the same errors as in one go, whatever the piece."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.errors import RequestError
from headway.runtime.embedded import model_path
from headway.serving import prompts as module
from headway.serving.json_object import JsonObject
from headway.serving.prompts import PromptReader
from headway.serving.tokenizer import ModelTokenizer

VOCAB = 1000
TOKENIZER = ModelTokenizer.load(Path(model_path()))


def read(text: str, piece: int, monkeypatch: pytest.MonkeyPatch) -> list[int] | str:
    monkeypatch.setattr(module, "PIECE_BYTES", piece)
    try:
        fields = JsonObject.parse(b'{"prompt": %b, "x": 1}' % text.encode())
        (prompt,) = PromptReader(TOKENIZER, VOCAB, 4).read(fields.raw("prompt"), add_special_tokens=True)
    except RequestError as error:
        return str(error)
    return array("i", prompt.data.tobytes()).tolist()


@settings(max_examples=60, derandomize=True)
@given(
    ids=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=60),
    piece=st.integers(1, 40),
    space=st.sampled_from([",", ", ", " ,\n "]),
)
def test_any_piece_gives_the_same_ids(ids: list[int], piece: int, space: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        assert read(f"[ {space.join(map(str, ids))} ]", piece, patch) == ids


@settings(max_examples=120, derandomize=True)
@given(
    items=st.lists(
        st.one_of(
            st.integers(-3, VOCAB + 3),
            st.sampled_from([1.5, True, None, "a,1", "],[", [1, 2], {"a": [1, 2]}, 10**30, 1e400]),
        ),
        min_size=1,
        max_size=8,
    ),
    piece=st.integers(1, 20),
)
def test_any_piece_gives_the_same_error(items: list[Any], piece: int) -> None:
    text = json.dumps([3, *items]).replace("Infinity", "1e400")
    with pytest.MonkeyPatch.context() as patch:
        assert read(text, piece, patch) == read(text, 1 << 20, patch)


@pytest.mark.parametrize("text", ["[1,]", "[,1]", "[1,,2]", "[1 2]", "[1,2", "[01]", "[1],2]"])
@pytest.mark.parametrize("piece", [1, 1 << 20])
def test_malformed_json_is_refused(text: str, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "not valid JSON" in str(read(text, piece, monkeypatch))


def test_no_piece_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is decoded at once, and so stalls other threads, does not grow with the prompt."""
    reader, seen = PromptReader(TOKENIZER, VOCAB, 4), []
    decoder = reader._ids

    class Watched:
        def decode(self, text: bytes) -> list[int]:
            seen.append(len(text))
            return decoder.decode(text)

    monkeypatch.setattr(reader, "_ids", Watched())
    (prompt,) = reader.read(msgspec.Raw(json.dumps([999] * 200_000).encode()), add_special_tokens=True)
    assert prompt.tokens == 200_000
    assert max(seen) <= module.PIECE_BYTES + 16
