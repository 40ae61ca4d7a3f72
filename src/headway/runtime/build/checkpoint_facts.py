"""What a checkpoint's folder says without loading it: end tokens, its name, a hash of all its bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headway.core.errors import ConfigError
from headway.runtime import embedded


def eos_ids(folder: Path) -> tuple[int, ...]:
    """Return the token ids that end an answer: all that any of the files names.

    generation_config.json and config.json give ids; tokenizer_config.json, or special_tokens_map.json where that has no
    `added_tokens_decoder`, give the text of `eos_token`. A fine-tuned model often has its own in one of them only.
    """
    config = _json(folder / "config.json")
    found: list[int] = []
    for data in (_json(folder / "generation_config.json"), config):
        value = data.get("eos_token_id")
        found += [item for item in (value if isinstance(value, list) else [value]) if type(item) is int]
    tokenizer = _json(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in tokenizer:
        tokenizer |= _json(folder / "special_tokens_map.json")
    token = tokenizer.get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    if isinstance(text, str):
        found += _ids_of(text, tokenizer, folder)
    vocabulary = config.get("vocab_size")
    most = vocabulary if isinstance(vocabulary, int) else max(found, default=0) + 1
    return tuple(dict.fromkeys(token for token in found if 0 <= token < most))


def _ids_of(text: str, config: Mapping[str, Any], folder: Path) -> list[int]:
    """Return the id of a token; empty where none of the tokenizer's files has it."""
    description = _json(folder / "tokenizer.json")
    for token in description.get("added_tokens") or ():
        if token.get("content") == text:
            return [token["id"]]
    vocabulary = (description.get("model") or {}).get("vocab") or {}
    if isinstance(vocabulary, list):
        vocabulary = {piece: index for index, (piece, _) in enumerate(vocabulary)}
    more = {token.get("content"): int(index) for index, token in (config.get("added_tokens_decoder") or {}).items()}
    known = {**_json(folder / "added_tokens.json"), **more, **vocabulary}
    return [known[text]] if text in known else []


def _json(path: Path) -> dict[str, Any]:
    """Return a file's JSON object; empty where there is none: whoever needs the file says so."""
    try:
        data = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def model_name(folder: str) -> str:
    """Return a model's default name: its folder's last part."""
    path = Path(folder).resolve()
    return embedded.MODEL_NAME if path == embedded.model_path().resolve() else path.name


def longest_context(folder: Path) -> int:
    """Return the positions that config.json says the model has. Raises ConfigError where it says none."""
    try:
        return int(json.loads((folder / "config.json").read_text())["max_position_embeddings"])
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(f"{folder}/config.json has no max_position_embeddings: name a checkpoint's folder") from None
