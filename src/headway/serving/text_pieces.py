"""Cutting long texts where their tokens are the same: the tokens of the pieces, joined, are those of the whole.

The tokenizer's own pre-tokenizer says where. It matches a pattern from left to right, so that in a window that begins
where a match does, all matches but the last ones are those of the whole text, in any script: each depends on what it
covers and on the character behind it. A cut is made at the begin of a match, or behind an added token. Patterns that
look further, and tokenizers without a pattern (SentencePiece), are given whole texts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from headway.core.errors import RequestError

if TYPE_CHECKING:
    import tokenizers

PIECE_CHARACTERS = 16 << 10
"""Longest piece of a long text, unless there is no cut in it: some 3 ms of tokenisation."""
LONGEST_RUN = 256 << 10
"""Most characters that are tokenised together: some 2 s of tokenisation."""

_UNSURE = 2
"""Matches at the end of a window that more text may change: `don` and `'` may be the word `don't`."""
_LOOKS_FURTHER = re.compile(r"\(\?[=!<]|(?<![\[\\])\^|(?<!\\)\$|\\[bBAzZGK]")
_FORMS = frozenset(("NFC", "NFD", "NFKC", "NFKD", "Lowercase"))
"""Normalizers that leave what they made as it is, and its parts as well."""
_BY_MATCH = frozenset(("ByteLevel", "Digits", "Split", "Punctuation", "BertPreTokenizer", "Whitespace"))
"""Pre-tokenizers that look at each earlier match alone, so that they may follow one that cuts."""


class TextPieces:
    """Cutter of one tokenizer's texts. Made by `of`."""

    def __init__(
        self, splitter: Any, normalizer: tokenizers.normalizers.Normalizer | None, added: list[str], spaces: bool
    ) -> None:
        self._splitter = splitter
        self._normalizer = normalizer
        # As the library finds them: the first, and of those the longest.
        self._added = re.compile("|".join(map(re.escape, sorted(added, key=len, reverse=True))) or r"(?!)")
        self._longest = max(map(len, added), default=0)
        # A piece that does not begin with a space would get one.
        self._spaces = spaces

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer, description: Mapping[str, Any]) -> TextPieces | None:
        """Make the cutter for a tokenizer and its tokenizer.json; None where no exact cut is known."""
        # With `split_special_tokens` special ones are text like any other.
        split = bool(backend.encode_special_tokens)
        added = [each for each in description.get("added_tokens") or [] if not (split and each.get("special"))]
        normalizer = description.get("normalizer")
        # Such added tokens depend on, or take, what is beside them; `normalized` ones are sought in other text.
        besides = ("single_word", "lstrip", "rstrip", *(("normalized",) if normalizer else ()))
        if any(token.get(name) for token in added for name in besides):
            return None
        if not {stage.get("type") for stage in _stages(normalizer, "normalizers")} <= _FORMS:
            return None
        if (description.get("model") or {}).get("dropout"):
            return None
        splitter = _splitter(description.get("pre_tokenizer"))
        if splitter is None:
            return None
        spaces = any(stage.get("add_prefix_space") for stage in _stages(description["pre_tokenizer"], "pretokenizers"))
        return cls(splitter, backend.normalizer, [token["content"] for token in added], spaces)

    def cut(self, text: str, most: int = PIECE_CHARACTERS) -> Iterator[str]:
        """Yield pieces of at most `most` characters, where there are cuts, whose concatenation is the normalized text.
        Raises RequestError for a text that has too many without one.

        A text that is not normalized is one piece where added tokens would come to be by that."""
        if self._normalizer is not None:
            normal = self._normalizer.normalize_str(text)
            if normal != text and self._added.findall(normal) != self._added.findall(text):
                yield text
                return
            text = normal
        begin = 0
        while begin < len(text):
            end = self._next(text, begin, most)
            yield text[begin:end]
            begin = end

    def _next(self, text: str, begin: int, most: int) -> int:
        """Return the last cut in the `most` characters from `begin` on, or the first one behind them."""
        while (end := begin + most) < len(text):
            segment = begin
            for found in self._added.finditer(text, begin, min(len(text), end + self._longest)):
                if found.start() >= end:
                    break
                segment = found.end()
            if segment >= end:
                return segment
            matches = self._splitter.pre_tokenize_str(text[segment:end])
            # Not at the first, which may begin with what stands before.
            for _, (start, _) in reversed(matches[1 : -_UNSURE - 1]):
                at = segment + int(start)
                # Of white space, the last character belongs to what follows: behind it is no cut.
                if not text[at - 1].isspace() and (not self._spaces or text[at] == " "):
                    return at
            if segment > begin and not self._spaces:
                return segment
            most *= 2
            if most > LONGEST_RUN:
                raise RequestError(
                    f"the text has {LONGEST_RUN} characters in a row that can only be tokenised together: send token "
                    "ids, or text with spaces",
                    "prompt",
                )
        return len(text)


def _stages(part: Mapping[str, Any] | None, members: str) -> list[Mapping[str, Any]]:
    """Return the members of a sequence, else the component itself."""
    if part is None:
        return []
    return list(part.get(members, ())) if part.get("type") == "Sequence" else [part]


def _splitter(pre_tokenizer: Mapping[str, Any] | None) -> Any:
    """Return the first stage, where it matches a pattern that looks at one more character and the others follow it."""
    from tokenizers import Regex, pre_tokenizers

    stages = _stages(pre_tokenizer, "pretokenizers")
    if not stages or not {stage.get("type") for stage in stages[1:]} <= _BY_MATCH:
        return None
    first = stages[0]
    if first.get("type") == "ByteLevel" and first.get("use_regex", True):
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    pattern = (first.get("pattern") or {}).get("Regex")
    plain = first.get("type") == "Split" and first.get("behavior") == "Isolated" and not first.get("invert")
    if not plain or not pattern or _LOOKS_FURTHER.search(pattern.replace(r"\s+(?!\S)", "")):
        return None
    return pre_tokenizers.Split(Regex(pattern), "isolated")
