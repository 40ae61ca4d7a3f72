"""Cutting long texts where their tokens are the same: the tokens of the pieces, joined, are those of the whole.

A cut is exact where (1) no added token's text spans it, (2) the normalizer treats both sides alone, and (3) the
pre-tokenizer ends a piece there whatever is behind. (3) is known for the patterns below: in each of them, a space after
a visible character, a change between letter and digit, and closing punctuation after a letter begin a new piece, and
no lookahead sees across. Tokenizers of another kind (SentencePiece without a pre-tokenizer) are given whole texts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

PIECE_CHARACTERS = 16 << 10
"""Shortest piece of a long text: some 3 ms of tokenisation."""
_SCAN_CHARACTERS = 16 << 10
"""Text that one search for a cut looks at: a search holds the interpreter's lock."""

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_O200K = (  # gpt-oss
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_KNOWN_PATTERNS = frozenset(
    (
        _GPT2,
        r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",  # the embedded model's
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}",  # Llama 3
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}",  # Qwen 2 and 3
        _O200K,
    )
)
_BY_PIECE = frozenset(("ByteLevel", "Digits", "Split", "Punctuation", "BertPreTokenizer", "Whitespace"))
"""Pre-tokenizers that look at each earlier piece alone, so that they may follow one that cuts."""

# Letters of scripts whose class every Unicode version agrees on, and which no normalization changes but composition.
_LETTER = "A-Za-z\u0410-\u044f\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3"
_SPACE_CUTS = r"(?<=[!-~])(?= )"
_ASCII_CUTS = rf"{_SPACE_CUTS}|(?<=[A-Za-z])(?=[0-9,.;:!?()])|(?<=[0-9])(?=[A-Za-z])"
_ANY_CUTS = rf"{_ASCII_CUTS}|(?<=[{_LETTER}])(?=[ 0-9,.;:!?()，。、；：！？（）])"


class TextPieces:
    """Cutter of one tokenizer's texts. Made by `of`."""

    def __init__(self, cuts: str, added: Sequence[str]) -> None:
        self._cuts = re.compile(cuts)
        self._added = added
        # Characters on each side of a cut in which an added token that spans it would begin and end.
        self._reach = max(map(len, added), default=1) - 1

    @classmethod
    def of(cls, description: Mapping[str, Any]) -> TextPieces | None:
        """Make the cutter for a tokenizer.json; None where no exact cut is known."""
        added = description.get("added_tokens") or []
        kinds = _types(description.get("normalizer"), "normalizers")
        # Such added tokens depend on, or take, what is beside them; `normalized` ones are sought in other text.
        besides = ("single_word", "lstrip", "rstrip", *(("normalized",) if kinds else ()))
        if any(token.get(name) for token in added for name in besides):
            return None
        if not set(kinds) <= {"NFC", "NFD", "NFKC", "NFKD", "Lowercase"} or not _cuts(description.get("pre_tokenizer")):
            return None
        if (description.get("model") or {}).get("dropout"):
            return None
        # Composition changes none of the characters around a cut; other forms leave ASCII alone.
        cuts = _ANY_CUTS if set(kinds) <= {"NFC"} else _ASCII_CUTS
        # A piece that does not begin with a space would get one.
        if '"add_prefix_space": true' in json.dumps(description.get("pre_tokenizer")):
            cuts = _SPACE_CUTS
        return cls(cuts, [token["content"] for token in added])

    def cut(self, text: str, least: int = PIECE_CHARACTERS) -> Iterator[str]:
        """Yield pieces of at least `least` characters (the last may be shorter), whose concatenation is `text`."""
        begin = 0
        while begin < len(text):
            end = self._next(text, begin + least)
            yield text[begin:end]
            begin = end

    def _next(self, text: str, begin: int) -> int:
        """Return the first exact cut from `begin` on, or the text's end."""
        while begin < len(text):
            found = self._cuts.search(text, begin, begin + _SCAN_CHARACTERS)
            if found is None:
                # One character less: a lookahead at the end of the searched part sees nothing.
                begin += _SCAN_CHARACTERS - 1
                continue
            at = found.start()
            around = text[max(0, at - self._reach) : at + self._reach]
            if not any(token in around for token in self._added):
                return at
            begin = at + 1
        return len(text)


def _types(part: Mapping[str, Any] | None, members: str) -> list[str]:
    """Return the types of a component, those of its members for a sequence."""
    if part is None:
        return []
    return (
        [str(each.get("type")) for each in part.get(members, ())] if part.get("type") == "Sequence" else [part["type"]]
    )


def _cuts(pre_tokenizer: Mapping[str, Any] | None) -> bool:
    """Whether the first pre-tokenizer is one of known patterns and the others look at its pieces only."""
    if pre_tokenizer is None:
        return False
    is_sequence = pre_tokenizer.get("type") == "Sequence"
    stages = pre_tokenizer.get("pretokenizers", ()) if is_sequence else (pre_tokenizer,)
    if not stages or not {stage.get("type") for stage in stages[1:]} <= _BY_PIECE:
        return False
    first = stages[0]
    if first.get("type") == "ByteLevel":
        return bool(first.get("use_regex", True))
    pattern = (first.get("pattern") or {}).get("Regex")
    plain = first.get("behavior") == "Isolated" and not first.get("invert")
    return first.get("type") == "Split" and plain and pattern in _KNOWN_PATTERNS
