"""Tokenizer of a checkpoint's folder: text to ids, ids to text, messages to text. Optional: without it, ids only.

All functions block. A server's long texts are encoded by processes of their own (`body_worker`), to which this is
pickled, others by the body reader's threads.
"""

from __future__ import annotations

import json
import logging
import os
from array import array
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.core.errors import CheckpointError, RequestError
from headway.serving.detokenizer import (
    ByteLevelDetokenizer,
    IncrementalDetokenizer,
    SilentDetokenizer,
    WindowDetokenizer,
    byte_level_bytes,
)
from headway.serving.text_pieces import PIECE_CHARACTERS, TextPieces
from headway.serving.token_bound import characters_per_token
from headway.serving.tokenizer_files import add_tokens, check_prefix_space
from headway.serving.tokenizing_memory import TokenizingMemory

if TYPE_CHECKING:
    import tokenizers

    from headway.serving.chat_template import ChatTemplate

DEFAULT_MEMORY = 1 << 30
"""Memory for texts that cannot be cut, in bytes."""
_OTHER_FILES = ("tokenizer.model", "vocab.json", "tekken.json", "tokenizer.tiktoken", "spiece.model", "qwen.tiktoken")
"""Files of tokenizers that need a library each."""

log = logging.getLogger("headway.server")


class ModelTokenizer:
    """One model's tokenizer and chat template. Immutable after construction; safe to use from several threads.

    memory: bytes that tokenising texts may take at one time; split_special_tokens: text never becomes a special token.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer | None, *, chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None, memory: int = DEFAULT_MEMORY,
        split_special_tokens: bool = False,
    ) -> None:  # fmt: skip
        self._backend = backend
        if backend is not None:
            # What the library saves of a tokenizer does not hold this.
            backend.encode_special_tokens = split_special_tokens
        self._made_of: dict[str, Any] = {
            "chat_template": chat_template,
            "special_tokens": special_tokens,
            "memory": memory,
            "split_special_tokens": split_special_tokens,
        }
        self._memory = TokenizingMemory(memory)
        self._pieces: TextPieces | None = None
        # Most characters that one token stands for; None: no bound is known.
        self.characters_per_token: float | None = None
        self._template: ChatTemplate | None = None
        if chat_template:
            from headway.serving.chat_template import ChatTemplate

            self._template = ChatTemplate(chat_template, special_tokens or {})
        self._turn_end: tuple[int, ...] = ()
        added = backend.get_added_tokens_decoder() if backend is not None else {}
        # As the library skips them: by their text, which a normalizer may change.
        self._special = frozenset(
            ident for ident, token in added.items() if token.special and backend and not backend.decode([ident])
        )
        # Bytes of each token id of a byte-level BPE vocabulary; None for other tokenizers.
        self._bytes = _byte_table(backend) if backend is not None else None
        self._around: tuple[list[int], list[int]] = ([], [])
        if backend is not None:
            description = json.loads(backend.to_str())
            self._around, exact = _special_around(backend)
            self._pieces = TextPieces.of(backend, description) if exact else None
            self.characters_per_token = characters_per_token(description, backend.get_vocab(with_added_tokens=True))
            if self._template is not None:
                tokens = {token.content: ident for ident, token in added.items()}
                end = self._template.turn_end(tokens)
                self._turn_end = () if end is None else (tokens[end],)

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        chat_template: str | None = None,
        memory: int = DEFAULT_MEMORY,
        default_template: str | None = None,
    ) -> ModelTokenizer:
        """Load a Hugging Face folder: tokenizer.json, tokenizer_config.json, chat_template.jinja; each may be missing.

        chat_template: a file to use instead of the folder's own, or the template's text, which has a brace;
        default_template: source for a model without one.
        Raises CheckpointError for an unreadable file.
        """
        config = _read_json(folder / "tokenizer_config.json")
        # As in transformers: newer configurations, which have this field, hold all special tokens themselves.
        if "added_tokens_decoder" not in config:
            config |= _read_json(folder / "special_tokens_map.json")
        template = chat_template
        if chat_template is None or "{" not in chat_template:
            named = Path(chat_template) if chat_template else folder / "chat_template.jinja"
            template = _read_template(named, config, chat_template is not None)
        path = folder / "tokenizer.json"
        if not path.is_file():
            others = [name for name in _OTHER_FILES if (folder / name).is_file()]
            if others:
                raise CheckpointError(
                    f"{folder} has {others[0]} but no tokenizer.json, which is what is read here: make one with "
                    "transformers: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
                )
            return cls(None)
        # One thread encodes one text: how many do is decided by the body reader.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        import tokenizers

        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{path} cannot be read as a tokenizer: {error}") from None
        # tokenizer.json may hold the padding and truncation of training, which would alter prompts.
        backend.no_padding()
        backend.no_truncation()
        add_tokens(backend, config, _read_json(folder / "added_tokens.json"), str(folder))
        check_prefix_space(backend, config, str(folder))
        if template is None and default_template is not None:
            log.warning("the model has no chat template: chats use a plain one, a line `role: text` for each message")
            template = default_template
        return cls(
            backend, chat_template=template, special_tokens=_special_tokens(config), memory=memory,
            split_special_tokens=config.get("split_special_tokens") is True,
        )  # fmt: skip

    @classmethod
    def none(cls) -> ModelTokenizer:
        """Make a tokenizer for a model without one: prompts must be token ids, and answers' text is empty."""
        return cls(None)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle what it is made of."""
        return partial(ModelTokenizer, **self._made_of), (self._backend,)

    @property
    def has_text(self) -> bool:
        """Whether there is a tokenizer; without it only token ids are served."""
        return self._backend is not None

    @property
    def has_template(self) -> bool:
        """Whether messages of a chat can be turned into a prompt."""
        return self._template is not None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text. Raises RequestError when there is no tokenizer."""
        return self.encode_long(text, add_special_tokens=add_special_tokens).tolist()

    def encode_long(self, text: str, *, add_special_tokens: bool, most_tokens: int | None = None) -> array[int]:
        """Return the token ids of a text as int32; with `most_tokens`, refuse one of more without tokenising all of it.

        Raises RequestError for such a text, for one that takes too much memory, and when there is no tokenizer.
        """
        if self._backend is None:
            raise RequestError("this model has no tokenizer: send the prompt as an array of token ids", "prompt")
        if most_tokens is not None:
            self._check_characters(text, most_tokens)
        if self._pieces is None or len(text) <= PIECE_CHARACTERS:
            return self._encoded(text, add_special_tokens)
        before, after = self._around if add_special_tokens else ([], [])
        ids = array("i", before)
        for piece in self._pieces.cut(text):
            if most_tokens is not None and len(ids) > most_tokens:
                raise RequestError(
                    f"This model's maximum context length is {most_tokens} tokens. However, the text has more", "prompt"
                )
            ids.extend(self._encoded(piece, add_special_tokens=False))
        ids.extend(after)
        return ids

    def _encoded(self, text: str, add_special_tokens: bool) -> array[int]:
        assert self._backend is not None
        with self._memory.hold(len(text)):
            # A batch of one: `encode` of the library would hold the interpreter's lock all the time.
            (found,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            return array("i", found.ids)

    def _check_characters(self, text: str, most_tokens: int) -> None:
        """Refuse a text that is too long whatever its tokens are. Raises RequestError."""
        each = self.characters_per_token
        if each is not None and len(text) > each * most_tokens:
            raise RequestError(
                f"This model's maximum context length is {most_tokens} tokens. However, the text has {len(text)} "
                f"characters; at most {int(each * most_tokens)} can fit (no token stands for more than {each:g})",
                "prompt",
            )

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of all `ids` together; empty when there is no tokenizer."""
        if self._backend is None:
            return ""
        # A batch of one, as for `encode`.
        return self._backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]

    def detokeniser(self, *, skip_special_tokens: bool, before: Sequence[int] = ()) -> IncrementalDetokenizer:
        """Make an incremental decoder for one answer; `before`: tokens whose text it continues, the last of them."""
        if self._backend is None:
            return SilentDetokenizer()
        skip = self._special if skip_special_tokens else frozenset()
        if self._bytes is not None:
            return ByteLevelDetokenizer(self._bytes, skip)
        return WindowDetokenizer(self._backend, skip, before)

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

    @property
    def turn_end(self) -> tuple[int, ...]:
        """The special token that the chat template puts behind an assistant's message; empty where it puts none."""
        return self._turn_end

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool, variables: Mapping[str, Any] | None
    ) -> str:
        """Apply the chat template. Raises RequestError when the model has no template or no tokenizer."""
        if self._template is None:
            what = "chat template" if self.has_text else "tokenizer"
            raise RequestError(f"'messages' cannot be used: this model has no {what}; use /v1/completions", "messages")
        return self._template.render(messages, add_generation_prompt=add_generation_prompt, variables=variables)


def _special_around(backend: tokenizers.Tokenizer) -> tuple[tuple[list[int], list[int]], bool]:
    """Return the special tokens that the tokenizer puts before and behind a text, and whether it does only that."""
    with_special, plain = backend.encode("a", add_special_tokens=True), backend.encode("a", add_special_tokens=False)
    first = next((at for at, special in enumerate(with_special.special_tokens_mask) if not special), 0)
    last = first + len(plain.ids)
    before, after = with_special.ids[:first], with_special.ids[last:]
    return (before, after), bool(plain.ids) and with_special.ids == before + plain.ids + after


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
        if "default" not in named:
            raise CheckpointError(
                f"{path.parent}: of the chat templates {', '.join(map(repr, named))} none is the default: choose one "
                "with --chat-template"
            )
        given = named["default"]
    return given if isinstance(given, str) else None
