"""Long texts: tokens of the pieces are those of the whole, bounds hold before tokenising, and no lock is held."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.errors import RequestError
from headway.runtime import embedded
from headway.serving.tokenizer import (
    BYTES_PER_CHARACTER,
    PIECE_CHARACTERS,
    ModelTokenizer,
    TextPieces,
)

EMBEDDED = Path(embedded.__file__).parent
CORPUS = [
    "the quick brown fox's 12 jobs, don't you'll 3.14 over a lazy dog!",
    "привет, мир",
    "漢字、かな。1a2b3c",
    "  \n\n",
]
ALPHABET = "ab sZ'.,;!?()-_/\n\r\t 019éяМ漢か。，\u0301\u00a0\u212a\U0001f600<|x>"


def trained(pattern: str | None, *, normalizer: str | None = None, added: Sequence[str] = ()) -> ModelTokenizer:
    """A small byte-level BPE with the given pattern; None: GPT-2's, inside the ByteLevel stage."""
    from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from tokenizers import Tokenizer as Backend

    backend: Any = Backend(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    split = [] if pattern is None else [pre_tokenizers.Split(Regex(pattern), "isolated")]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*split, level])
    backend.normalizer = getattr(normalizers, normalizer)() if normalizer else None
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        CORPUS * 4,
        trainers.BpeTrainer(
            vocab_size=420,
            special_tokens=["<s>", "</s>", *added],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return ModelTokenizer(backend)


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
PATTERNS = {
    "starcoder": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "llama 3": rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}",
    "qwen": rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}",
    "o200k": (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
        rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}

TOKENIZERS = {
    "embedded": ModelTokenizer.load(EMBEDDED),
    "gpt2": trained(None, added=["<|x|>"]),
    **{name: trained(pattern, added=["<|x|>", "x|>y"]) for name, pattern in PATTERNS.items()},
    **{name: trained(None, normalizer=name) for name in ("NFC", "NFKC", "NFD", "Lowercase")},
}


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=60, deadline=None)
@given(
    text=st.lists(
        st.one_of(
            st.text(ALPHABET, max_size=12), st.sampled_from(["<|x|>", "<|end|>", "'ll", "  ", "don't", "漢字", "\r\n"])
        ),
        max_size=12,
    ).map("".join),
    most=st.integers(1, 30),
)
def test_the_tokens_of_the_pieces_are_those_of_the_whole(name: str, text: str, most: int) -> None:
    tokenizer = TOKENIZERS[name]
    assert tokenizer._pieces is not None
    pieces = list(tokenizer._pieces.cut(text, most))
    joined = [token for piece in pieces for token in tokenizer._encoded(piece, add_special_tokens=False)]
    assert joined == tokenizer._encoded(text, add_special_tokens=False).tolist()


@pytest.mark.parametrize("name", TOKENIZERS)
def test_long_prose_is_cut_and_keeps_its_special_tokens(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    assert tokenizer._pieces is not None
    text = "".join(CORPUS) * 2000
    pieces = list(tokenizer._pieces.cut(text))
    assert max(map(len, pieces)) <= PIECE_CHARACTERS
    assert min(map(len, pieces[:-1])) > PIECE_CHARACTERS - 100
    for special in (True, False):
        assert tokenizer.encode(text, add_special_tokens=special) == tokenizer._encoded(text, special).tolist()


def changed(**parts: Any) -> dict[str, Any]:
    """The embedded tokenizer's description with other parts."""
    return {**json.loads((EMBEDDED / "tokenizer.json").read_text()), **parts}


@pytest.mark.parametrize(
    "parts",
    [
        {"pre_tokenizer": None},
        {"pre_tokenizer": {"type": "ByteLevel", "use_regex": False}},
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "a|b"}, "behavior": "Removed"}},
        *(
            {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated"}}
            for regex in ("a(?=bc)", "(?<=a)b", r"\\ba", "^a", "a$", "a(?!b)")
        ),
        {"normalizer": {"type": "Prepend", "prepend": "_"}},
        {"added_tokens": [{"content": "<mask>", "lstrip": True}]},
    ],
)
def test_tokenizers_without_a_known_cut_get_whole_texts(parts: dict[str, Any]) -> None:
    tokenizer = TOKENIZERS["embedded"]
    assert tokenizer._backend is not None
    assert TextPieces.of(tokenizer._backend, changed(**parts)) is None


def test_tokenising_stops_where_the_context_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, seen = TOKENIZERS["embedded"], [0]
    encoded = tokenizer._encoded

    def counted(text: str, add_special_tokens: bool) -> Any:
        seen[0] += len(text)
        return encoded(text, add_special_tokens)

    monkeypatch.setattr(tokenizer, "_encoded", counted)
    with pytest.raises(RequestError, match="maximum context length is 30000 tokens"):
        tokenizer.encode_long("a quick 1 2 3 4 5 6 " * 50_000, add_special_tokens=False, most_tokens=30_000)
    assert seen[0] < 200_000


SCRIPTS = {
    "arabic": "هذا نص طويل ",
    "hindi": "यह एक लंबा पाठ है। ",
    "thai": "นี่คือข้อความยาว",
    "json": '{"a":[1,2,{"bc":"d"}],"e":null},',
    "chinese": "一段很长的文字。",
}


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("name", ["gpt2", "llama 3", "NFC"])
def test_any_script_with_matches_is_cut(name: str, script: str) -> None:
    tokenizer = TOKENIZERS[name]
    assert tokenizer._pieces is not None
    text = SCRIPTS[script] * 5000
    pieces = list(tokenizer._pieces.cut(text))
    assert max(map(len, pieces)) <= PIECE_CHARACTERS
    assert tokenizer.encode(text, add_special_tokens=True) == tokenizer._encoded(text, True).tolist()


def test_normalizing_makes_no_special_token() -> None:
    tokenizer = trained(None, normalizer="NFKC", added=["<|x|>"])
    assert tokenizer._pieces is not None
    text = "＜|x|＞ some words " * 2000
    assert list(tokenizer._pieces.cut(text)) == [text]
    assert tokenizer.encode(text, add_special_tokens=False) == tokenizer._encoded(text, False).tolist()


@pytest.mark.parametrize("text", ["some words of english, " * 20_000, "9f" * 200_000, "a" * 200_000])
def test_other_threads_run_while_a_text_is_tokenised(text: str) -> None:
    tokenizer, turns, over = TOKENIZERS["embedded"], [0], threading.Event()

    def turn() -> None:
        while not over.is_set():
            time.sleep(0.0005)
            turns[0] += 1

    other = threading.Thread(target=turn)
    other.start()
    turns[0] = 0
    tokenizer.encode(text, add_special_tokens=False)
    count = turns[0]
    over.set()
    other.join()
    # With the lock held throughout, a turn or two.
    assert count >= 8


def test_a_text_that_cannot_be_cut_takes_a_bounded_memory() -> None:
    tokenizer = ModelTokenizer.load(EMBEDDED, memory=1000 * BYTES_PER_CHARACTER)
    assert tokenizer.encode("a" * 1000, add_special_tokens=False)
    with pytest.raises(RequestError, match="allows 1000: send token ids"):
        tokenizer.encode("a" * 1001, add_special_tokens=False)
