"""Tokens to text and stop strings: how a text is cut into tokens never changes what is shown."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.request import TokenLogprobs
from headway.runtime.engine.protocol import OutputDelta
from headway.serving.answer import AnswerAssembler
from headway.serving.jobs import TextOptions
from headway.serving.text import StopMatcher, WindowDetokenizer
from headway.serving.tokenizer import ModelTokenizer


@pytest.fixture(scope="module")
def byte_ids(tokenizer: ModelTokenizer) -> dict[int, int]:
    """The token that stands for each single byte."""
    found = {tokenizer.token_bytes(token): token for token in range(2, 258)}
    return {byte: found[bytes([byte])] for byte in range(256)}


@settings(max_examples=150, deadline=None)
@given(st.text())
def test_text_survives_any_tokenisation(tokenizer: ModelTokenizer, byte_ids: dict[int, int], text: str) -> None:
    for tokens in (tokenizer.encode(text, add_special_tokens=False), [byte_ids[byte] for byte in text.encode()]):
        stream = tokenizer.detokeniser(skip_special_tokens=True)
        pieces = [stream.feed(token) for token in tokens]
        assert "".join(pieces) + stream.flush() == text


@settings(max_examples=100, deadline=None)
@given(st.binary())
def test_broken_bytes_decode_as_in_one_go(tokenizer: ModelTokenizer, byte_ids: dict[int, int], data: bytes) -> None:
    tokens = [byte_ids[byte] for byte in data]
    stream = tokenizer.detokeniser(skip_special_tokens=True)
    shown = "".join([*(stream.feed(token) for token in tokens), stream.flush()])
    assert shown == data.decode("utf-8", "replace") == tokenizer.decode(tokens)


def test_special_tokens_are_skipped_or_shown(tokenizer: ModelTokenizer) -> None:
    for skip, expected in ((True, "a"), (False, "<s>a</s>")):
        stream = tokenizer.detokeniser(skip_special_tokens=skip)
        tokens = [0, *tokenizer.encode("a", add_special_tokens=False), 1, 511]
        assert "".join(stream.feed(token) for token in tokens) + stream.flush() == expected


def _sentencepiece() -> object:
    """A tokenizer of the SentencePiece kind: words with a leading mark, bytes as a fallback."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models

    vocab = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}}
    for word in ("\u2581hello", "\u2581world", "\u2581", "!", "ing"):
        vocab[word] = len(vocab)
    backend = Backend(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


SENTENCEPIECE = _sentencepiece()


def test_window_detokeniser_shows_incomplete_bytes_after_its_patience() -> None:
    stream = WindowDetokenizer(SENTENCEPIECE, frozenset())
    shown = [stream.feed(0xC3 + 1) for _ in range(400)]
    assert len("".join(shown)) >= 390
    assert len(stream._pending) <= 4
    assert len(stream._context) <= 4


def _cut(text: str, cuts: Sequence[int]) -> list[str]:
    places = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    return [text[begin:end] for begin, end in itertools.pairwise(places)]


def _expected(text: str, stops: Sequence[str], include: bool) -> tuple[str, str | None]:
    """Reference: the earliest end of any stop string; of those that end there the longest."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end if include else end - len(stop)], stop
    return text, None


_ABC = st.text(alphabet="abc", max_size=40)


@settings(max_examples=400, deadline=None)
@given(
    _ABC, st.lists(st.text(alphabet="abc", min_size=1, max_size=6), min_size=1, max_size=4, unique=True),
    st.lists(st.integers(0, 40)), st.booleans(),
)  # fmt: skip
def test_stop_strings_do_not_depend_on_the_cut(text: str, stops: list[str], cuts: list[int], include: bool) -> None:
    matcher = StopMatcher(stops, include=include)
    shown = ""
    for part in _cut(text, cuts):
        shown += matcher.feed(part)
        if matcher.matched is None:
            assert not any(stop in shown for stop in stops)
            assert _expected(text, stops, include)[0].startswith(shown)
    if matcher.matched is None:
        shown += matcher.flush()
    assert (shown, matcher.matched) == _expected(text, stops, include)


def test_only_a_possible_stop_string_is_held_back() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.feed("say E") == "say "
    assert matcher.feed("EN") == "E"
    assert matcher.feed("T") == "ENT"
    assert matcher.flush() == ""


def _assemble(
    tokenizer: ModelTokenizer, tokens: Sequence[int], size: int, options: TextOptions
) -> tuple[str, list[int], int]:
    assembler = AnswerAssembler(tokenizer, options)
    text, scored, used = "", [], 0
    parts = [tuple(tokens[begin : begin + size]) for begin in range(0, len(tokens), size)]
    for number, part in enumerate(parts):
        marks = tuple(TokenLogprobs(-1.0, ()) for _ in part)
        piece = assembler.feed(
            OutputDelta(id="x", tokens=part, logprobs=marks, finish="length" if number == len(parts) - 1 else None)
        )
        text += piece.text
        scored += [item.token for item in piece.scored]
        used += len(piece.tokens)
        if piece.finish is not None:
            break
    return text, scored, used


@pytest.mark.parametrize("size", [1, 2, 3, 50])
def test_a_stop_string_across_tokens_ends_the_text(
    tokenizer: ModelTokenizer, ids: Callable[[str], list[int]], size: int
) -> None:
    tokens = [token for char in "hello STOP world" for token in ids(char)]
    text, scored, used = _assemble(tokenizer, tokens, size, TextOptions(stops=("STOP",)))
    assert text == "hello "
    assert tokenizer.decode(scored) == "hello "
    assert used == len("hello STOP")


@pytest.mark.parametrize("size", [1, 3, 50])
def test_stop_strings_before_min_tokens_do_not_count(
    tokenizer: ModelTokenizer, ids: Callable[[str], list[int]], size: int
) -> None:
    tokens = [token for char in "a.b.c.d" for token in ids(char)]
    assert _assemble(tokenizer, tokens, size, TextOptions(stops=(".",), min_tokens=3))[0] == "a.b"


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=30), st.integers(1, 5))
def test_logprobs_cover_all_tokens_when_nothing_stops(tokenizer: ModelTokenizer, text: str, size: int) -> None:
    tokens = tokenizer.encode(text, add_special_tokens=False)
    if tokens:
        shown, scored, _ = _assemble(tokenizer, tokens, size, TextOptions(stops=("\x00never\x00",)))
        assert shown == text
        assert scored == tokens


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_token_is_shown_when_asked(
    tokenizer: ModelTokenizer, ids: Callable[[str], list[int]], include: bool
) -> None:
    *first, last = ids("hello world!")
    assembler = AnswerAssembler(tokenizer, TextOptions(include_stop=include))
    pieces = [
        assembler.feed(OutputDelta(id="x", tokens=tuple(first))),
        assembler.feed(OutputDelta(id="x", finish="stop", stop_token=last)),
    ]
    assert "".join(piece.text for piece in pieces) == ("hello world!" if include else "hello world")
    assert pieces[-1].stop_reason == last
