"""Prompts in the engine's format: token ids as int32 in one buffer, built once from text or ids."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from headway.core.errors import RequestError
from headway.serving.json_object import JsonObject
from headway.serving.tokenizer import ModelTokenizer

PIECE_BYTES = 32 << 10
"""JSON of token ids is decoded in pieces of this size. A decoder holds the interpreter's lock from first byte to last,
so that a million ids at once would stall every other thread, the event loop's among them, for some 60 ms."""


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids of one prompt."""

    data: memoryview
    """Little-endian int32, sent to the engine without another copy."""
    tokens: int
    """Number of ids: a quarter of the bytes of `data`."""

    @classmethod
    def of(cls, ids: Sequence[int]) -> TokenPrompt:
        """Make a prompt of ids that are known to be in the vocabulary."""
        buffer = ids if isinstance(ids, array) else array("i", ids)
        if sys.byteorder == "big":
            buffer.byteswap()
        return cls(memoryview(buffer).cast("B"), len(ids))


class PromptReader:
    """Reader of prompts: text, token ids or messages. Safe to use from several threads.

    vocab_size: exclusive bound of the token ids; max_prompts: most prompts in one request; most_tokens: longest text,
    in tokens.
    """

    def __init__(
        self, tokenizer: ModelTokenizer, vocab_size: int, max_prompts: int, most_tokens: int | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_prompts = max_prompts
        self._most_tokens = most_tokens
        token = Annotated[int, msgspec.Meta(ge=0, lt=vocab_size)]
        self._ids: msgspec.json.Decoder[list[int]] = msgspec.json.Decoder(list[token])
        self._many: msgspec.json.Decoder[list[msgspec.Raw]] = msgspec.json.Decoder(list[msgspec.Raw])

    def read(self, raw: msgspec.Raw, *, add_special_tokens: bool, name: str = "prompt") -> tuple[TokenPrompt, ...]:
        """Read text, token ids, or an array of either, as one or several prompts; none of them is empty.

        raw: the JSON of the body's field `name`. Raises RequestError.
        """
        if not _starts(raw, b"["):
            return (self._one(raw, add_special_tokens, name, name),)
        # An array of neither arrays nor strings: one prompt of token ids (or an empty one).
        if not _starts(raw, b"[", skip=1) and not _starts(raw, b'"', skip=1):
            return (self._token_ids(raw, name, name),)
        items = self._many.decode(raw)
        if len(items) > self._max_prompts:
            asked = f"'{name}' holds {len(items)} prompts"
            raise RequestError(f"{asked}; at most {self._max_prompts} are allowed (--max-prompts)", name)
        together = len(memoryview(raw))
        return tuple(
            self._one(item, add_special_tokens, name, f"{name}[{index}]", together) for index, item in enumerate(items)
        )

    def chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool, variables: Mapping[str, Any] | None
    ) -> TokenPrompt:
        """Render messages with the model's chat template and tokenize them as one prompt.

        Special tokens are part of the template, so the tokenizer adds none. Raises RequestError.
        """
        text = self._tokenizer.render_chat(messages, add_generation_prompt=add_generation_prompt, variables=variables)
        ids = self._encode(text, "messages", add_special_tokens=False)
        if not ids:
            raise RequestError("the chat template makes an empty prompt of 'messages'", "messages")
        return TokenPrompt.of(ids)

    def token_ids(self, raw: msgspec.Raw, name: str) -> list[int]:
        """Read an array of token ids; it may be empty. name: the body's field. Raises RequestError."""
        if not _starts(raw, b"["):
            raise RequestError(f"'{name}' must be an array of token ids", name)
        return self._decode_ids(raw, name, name).tolist()

    def _one(self, raw: msgspec.Raw, add_special_tokens: bool, name: str, label: str, together: int = 0) -> TokenPrompt:
        if _starts(raw, b"["):
            return self._token_ids(raw, name, label)
        text = JsonObject({name: raw}).get(name)
        if not isinstance(text, str):
            raise RequestError(f"'{label}' must be text or an array of token ids", name)
        return self.text(text, add_special_tokens=add_special_tokens, name=name, label=label, together=together)

    def text(
        self, text: str, *, add_special_tokens: bool, name: str = "prompt", label: str = "prompt", together: int = 0
    ) -> TokenPrompt:
        """Tokenize a text. label: what errors call it in the body's field `name`. Raises RequestError when empty.

        together: bytes of all texts of its request, where it is one of several.
        """
        if not text:
            raise RequestError(f"'{label}' is empty", name)
        ids = self._encode(text, name, add_special_tokens=add_special_tokens, together=together)
        if not ids:
            raise RequestError(f"'{label}' is empty: the text has no tokens", name)
        return TokenPrompt.of(ids)

    def _encode(self, text: str, name: str, *, add_special_tokens: bool, together: int = 0) -> array[int]:
        """Tokenize a text of the body's field `name`. Raises RequestError."""
        try:
            return self._tokenizer.encode_long(
                text, add_special_tokens=add_special_tokens, most_tokens=self._most_tokens, together=together
            )
        except RequestError as error:
            raise RequestError(str(error), name) from None

    def _token_ids(self, raw: msgspec.Raw, name: str, label: str) -> TokenPrompt:
        ids = self._decode_ids(raw, name, label)
        if not ids:
            raise RequestError(f"'{label}' is empty", name)
        return TokenPrompt.of(ids)

    def _decode_ids(self, raw: msgspec.Raw, name: str, label: str) -> array[int]:
        found = self._in_pieces(bytes(raw))
        if found is not None:
            return found
        try:
            # Decode again as a whole: only this error has the index of the faulty item.
            return array("i", self._ids.decode(raw))
        except msgspec.ValidationError as error:
            where = str(error).rpartition("$")[2].rstrip("`")
            message = f"'{label}'{where and ' at ' + where} must be a token id in 0..{self._vocab_size - 1}"
            raise RequestError(message, name) from None

    def _in_pieces(self, text: bytes) -> array[int] | None:
        """Decode a syntactically valid JSON array piece by piece; return None when an item is not a token id."""
        ids = array("i")
        at, end = text.index(b"[") + 1, text.rindex(b"]")
        while at < end:
            # Cut at the first comma after the piece. A comma inside a nested item makes the piece invalid: None.
            cut = text.find(b",", min(at + PIECE_BYTES, end), end)
            cut = end if cut < 0 else cut
            try:
                ids.extend(self._ids.decode(b"[%b]" % text[at:cut]))
            except msgspec.MsgspecError:
                return None
            at = cut + 1
        return ids


def _starts(raw: msgspec.Raw, char: bytes, skip: int = 0) -> bool:
    """Whether the JSON text starts with `char` after `skip` characters and white space."""
    return bytes(memoryview(raw)[skip : skip + 64]).lstrip()[:1] == char
