"""What a checkpoint's folder says without loading it: end tokens, its name, a hash of all its bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headway.core.errors import ConfigError
from headway.runtime import embedded


def eos_ids(folder: Path) -> tuple[int, ...]:
    """Return the token ids that end an answer, from generation_config.json, else config.json; empty for neither."""
    # generation_config.json lists all end tokens of a chat model, config.json often only one.
    for name in ("generation_config.json", "config.json"):
        try:
            data: dict[str, Any] = json.loads((folder / name).read_text())
        except (OSError, ValueError):
            continue
        value = data.get("eos_token_id")
        if isinstance(value, int):
            return (value,)
        if isinstance(value, list):
            return tuple(int(v) for v in value)
    return ()


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
