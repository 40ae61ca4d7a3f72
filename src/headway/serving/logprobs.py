"""Log-probabilities in the two shapes of the OpenAI API."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from headway.core.sampling import TokenLogprobs
from headway.serving.tokenizer import ModelTokenizer

_LOWEST = -9999.0
_PART = 512
"""Tokens that are encoded at once: some milliseconds."""


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """One token of the answer with its log-probabilities."""

    token: int
    logprobs: TokenLogprobs | None
    """None: the first token of a prompt, which nothing predicts."""
    offset: int
    """Start of its text in the answer, in characters."""


def completion_logprobs(scored: Sequence[ScoredToken], tokenizer: ModelTokenizer) -> dict[str, Any]:
    """Return the format of /v1/completions: parallel arrays; alternatives as an object of text to log-probability."""
    return {
        "tokens": [_label(item.token, tokenizer) for item in scored],
        "token_logprobs": [item.logprobs and _finite(item.logprobs.logprob) for item in scored],
        "top_logprobs": [
            item.logprobs and {_label(token, tokenizer): _finite(value) for token, value in item.logprobs.top}
            for item in scored
        ],
        "text_offset": [item.offset for item in scored],
    }


def prompt_logprobs(scored: Sequence[ScoredToken], tokenizer: ModelTokenizer) -> msgspec.Raw:
    """Return vLLM's form of a prompt's log-probabilities: for each token an object by id, the token's own first.

    As JSON, encoded in parts: an encoder holds the interpreter's lock from first byte to last.
    """
    parts = [
        msgspec.json.encode(_prompt_entries(scored[at : at + _PART], tokenizer))[1:-1]
        for at in range(0, len(scored), _PART)
    ]
    return msgspec.Raw(b"[" + b",".join(parts) + b"]")


def _prompt_entries(scored: Sequence[ScoredToken], tokenizer: ModelTokenizer) -> list[dict[str, Any] | None]:
    found: list[dict[str, Any] | None] = []
    for item in scored:
        if item.logprobs is None:
            found.append(None)
            continue
        values = {item.token: item.logprobs.logprob, **dict(item.logprobs.top)}
        found.append(
            {
                str(token): {"logprob": _finite(value), "decoded_token": _label(token, tokenizer)}
                for token, value in values.items()
            }
        )
    return found


def chat_logprobs(scored: Sequence[ScoredToken], tokenizer: ModelTokenizer) -> dict[str, Any]:
    """Return the format of /v1/chat/completions: one entry per token with its bytes, alternatives likewise."""
    content = []
    for item in scored:
        if item.logprobs is None:
            continue
        entry = _entry(item.token, item.logprobs.logprob, tokenizer)
        entry["top_logprobs"] = [_entry(token, value, tokenizer) for token, value in item.logprobs.top]
        content.append(entry)
    return {"content": content}


def _entry(token: int, logprob: float, tokenizer: ModelTokenizer) -> dict[str, Any]:
    return {
        "token": _label(token, tokenizer),
        "logprob": _finite(logprob),
        "bytes": list(tokenizer.token_bytes(token)),
    }


def _label(token: int, tokenizer: ModelTokenizer) -> str:
    """Return the token's text; without a tokenizer, its id. Bytes that are not UTF-8 by themselves are escaped."""
    if not tokenizer.has_text:
        return f"token_id:{token}"
    data = tokenizer.token_bytes(token)
    try:
        # A token may hold a part of a character, which JSON text cannot.
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(value: float) -> float:
    """Return the value with -9999 as lower bound: JSON has no infinity for an impossible token."""
    return max(_LOWEST, value)
