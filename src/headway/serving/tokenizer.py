"""Tokenizer of a checkpoint's folder: text to ids, ids to text, messages to text. Optional: without it, ids only.

All functions block; large texts are encoded in the body reader's threads (the tokenizers library releases the GIL).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.core.errors import CheckpointError, RequestError
from headway.serving.chat_template import ChatTemplate
from headway.serving.detokenizer import (
    ByteLevelDetokenizer,
    IncrementalDetokenizer,
    SilentDetokenizer,
    WindowDetokenizer,
    byte_level_bytes,
)

if TYPE_CHECKING:
    import tokenizers


class ModelTokenizer:
    """One model's tokenizer and chat template. Immutable after construction; safe to use from several threads."""

    def __init__(
        self, backend: tokenizers.Tokenizer | None, *, chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self._backend = backend
        self._template = ChatTemplate(chat_template, special_tokens or {}) if chat_template else None
        added = backend.get_added_tokens_decoder() if backend is not None else {}
        self._special = frozenset(ident for ident, token in added.items() if token.special)
        # Bytes of each token id of a byte-level BPE vocabulary; None for other tokenizers.
        self._bytes = _byte_table(backend) if backend is not None else None

    @classmethod
    def load(cls, folder: Path, *, chat_template: Path | None = None) -> ModelTokenizer:
        """Load a Hugging Face folder: tokenizer.json, tokenizer_config.json, chat_template.jinja; each may be missing.

        chat_template: a file to use instead of the folder's own. Raises CheckpointError for an unreadable file.
        """
        config = _read_json(folder / "tokenizer_config.json") | _special_map(folder / "special_tokens_map.json")
        template = _read_template(chat_template or folder / "chat_template.jinja", config, chat_template is not None)
        path = folder / "tokenizer.json"
        if not path.is_file():
            return cls(None)
        import tokenizers

        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{path} cannot be read as a tokenizer: {error}") from None
        # tokenizer.json may hold the padding and truncation of training, which would alter prompts.
        backend.no_padding()
        backend.no_truncation()
        return cls(backend, chat_template=template, special_tokens=_special_tokens(config))

    @classmethod
    def none(cls) -> ModelTokenizer:
        """Make a tokenizer for a model without one: prompts must be token ids, and answers' text is empty."""
        return cls(None)

    @property
    def has_text(self) -> bool:
        """Whether there is a tokenizer; without it only token ids are served."""
        return self._backend is not None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text. Raises RequestError when there is no tokenizer."""
        if self._backend is None:
            raise RequestError("this model has no tokenizer: send the prompt as an array of token ids", "prompt")
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of all `ids` together; empty when there is no tokenizer."""
        if self._backend is None:
            return ""
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def detokeniser(self, *, skip_special_tokens: bool) -> IncrementalDetokenizer:
        """Make an incremental decoder for one answer."""
        if self._backend is None:
            return SilentDetokenizer()
        skip = self._special if skip_special_tokens else frozenset()
        if self._bytes is not None:
            return ByteLevelDetokenizer(self._bytes, skip)
        return WindowDetokenizer(self._backend, skip)

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one token, for log-probability reports; may be a part of a UTF-8 character."""
        if self._backend is None:
            return b""
        if self._bytes is not None:
            return self._bytes.get(token, b"")
        piece = self._backend.id_to_token(token) or ""
        # SentencePiece: byte fallback tokens are spelt <0xNN>, and U+2581 stands for a space.
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        return piece.replace("\u2581", " ").encode() if token not in self._special else piece.encode()

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool, variables: Mapping[str, Any] | None
    ) -> str:
        """Apply the chat template. Raises RequestError when the model has no template or no tokenizer."""
        if self._template is None:
            what = "chat template" if self.has_text else "tokenizer"
            raise RequestError(f"'messages' cannot be used: this model has no {what}; use /v1/completions", "messages")
        return self._template.render(messages, add_generation_prompt=add_generation_prompt, variables=variables)


def _byte_table(backend: tokenizers.Tokenizer) -> dict[int, bytes] | None:
    """Return the bytes of each token id of a byte-level BPE tokenizer (its only decoder is ByteLevel); else None."""
    decoder = json.loads(backend.to_str()).get("decoder") or {}
    stages = decoder.get("decoders", [decoder])
    # Any further decoder stage (metaspace, strip) would change text beyond the bytes of single tokens.
    if [stage.get("type") for stage in stages] != ["ByteLevel"]:
        return None
    return {ident: byte_level_bytes(piece) for piece, ident in backend.get_vocab(with_added_tokens=True).items()}


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    return value


def _special_map(path: Path) -> dict[str, Any]:
    return {key: value for key, value in _read_json(path).items() if key.endswith("_token")}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return `bos_token`, `eos_token` and the like as strings; older files hold objects with `content`."""
    found = {}
    for key, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            found[key] = text
    return found


def _read_template(path: Path, config: Mapping[str, Any], required: bool) -> str | None:
    """Return the chat template: the separate file's, else the one in tokenizer_config.json (its "default" of several).

    required: raise CheckpointError when the separate file is missing.
    """
    if path.is_file():
        return path.read_text("utf-8")
    if required:
        raise CheckpointError(f"chat template {path} does not exist")
    given = config.get("chat_template")
    if isinstance(given, list):
        named = {str(item.get("name")): item.get("template") for item in given if isinstance(item, dict)}
        given = named.get("default")
    return given if isinstance(given, str) else None
