"""How many characters of text one token can stand for: a bound on texts that is known before they are tokenised."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from headway.serving.detokenizer import byte_level_bytes

_BYTE_TOKENS = frozenset(f"<0x{byte:02X}>" for byte in range(256))
_COMPOSED = 4
"""Most characters that canonical composition (NFC, NFKC) makes one of: Unicode's longest decomposition."""


def characters_per_token(description: Mapping[str, Any], vocabulary: Collection[str]) -> float | None:
    """Return the most characters of a text that one token stands for, so that n tokens have at most n times as many.

    description: the tokenizer.json. None where there is no such bound, because the tokenizer drops characters (white
    space between words, accents) or makes one unknown token of arbitrarily many. Otherwise the longest entry of the
    vocabulary, in characters, times the characters that the normalizer makes one of.
    """
    model = description.get("model") or {}
    added = description.get("added_tokens") or []
    factor = _normalizer_factor(description.get("normalizer"))
    # Added tokens of these kinds take the white space beside them.
    takes = any(token.get("lstrip") or token.get("rstrip") for token in added)
    if factor is None or takes or model.get("type") != "BPE":
        return None
    stages = _members(description.get("pre_tokenizer"), "pretokenizers")
    if any(_drops(stage) for stage in stages):
        return None
    if any(stage.get("type") == "ByteLevel" for stage in stages):
        known = {byte_level_bytes(piece) for piece in vocabulary if len(piece) == 1}
        if not {bytes([byte]) for byte in range(256)} <= known:
            return None
        # Each character has one byte that is no continuation byte.
        longest = max(sum(byte & 0xC0 != 0x80 for byte in byte_level_bytes(piece)) for piece in vocabulary)
        return factor * max(longest, 1)
    # Unknown characters: dropped without an unknown token, many in one with `fuse_unk`, one a byte with a fall-back.
    spelt = model.get("byte_fallback") and set(vocabulary) >= _BYTE_TOKENS
    if not spelt and (model.get("unk_token") is None or model.get("fuse_unk")):
        return None
    return factor * max(map(len, vocabulary))


def _normalizer_factor(normalizer: Mapping[str, Any] | None) -> float | None:
    """Return the most characters of which the normalizer makes one; None without a bound."""
    factor = 1.0
    for stage in _members(normalizer, "normalizers"):
        match stage.get("type"):
            case "NFC" | "NFKC":
                factor *= _COMPOSED
            case "NFD" | "NFKD" | "Lowercase" | "Prepend":
                pass
            case "Replace" if "String" in stage.get("pattern", {}) and stage.get("content"):
                factor *= max(1.0, len(stage["pattern"]["String"]) / len(stage["content"]))
            case _:
                return None
    return factor


def _drops(stage: Mapping[str, Any]) -> bool:
    """Whether a pre-tokenizer may leave characters out."""
    if stage.get("type") in ("Split", "Punctuation"):
        return str(stage.get("behavior", "Isolated")) == "Removed"
    return stage.get("type") not in ("ByteLevel", "Digits", "Metaspace", "UnicodeScripts")


def _members(part: Mapping[str, Any] | None, name: str) -> list[Mapping[str, Any]]:
    if part is None:
        return []
    return list(part.get(name, ())) if part.get("type") == "Sequence" else [part]
