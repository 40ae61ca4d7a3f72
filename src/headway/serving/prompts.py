"""Prompts in the engine's format: token ids as int32 in one buffer, built once from text or ids."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headway.core.errors import RequestError
from headway.serving.tokenizer import ModelTokenizer


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
        return cls.holding(memoryview(buffer).cast("B"))

    @classmethod
    def holding(cls, data: bytes | memoryview) -> TokenPrompt:
        """Make a prompt of little-endian int32."""
        return cls(memoryview(data), len(data) // 4)

    def __reduce__(self) -> tuple[Callable[[bytes], TokenPrompt], tuple[bytes]]:
        """Pickle the ids as bytes."""
        return TokenPrompt.holding, (bytes(self.data),)


class PromptReader:
    """Reader of prompts: text, token ids or messages. Safe to use from several threads.

    vocab_size: exclusive bound of the token ids; max_prompts: most prompts in one request; most_tokens: longest prompt,
    in tokens.
    """

    def __init__(
        self, tokenizer: ModelTokenizer, vocab_size: int, max_prompts: int, most_tokens: int | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_prompts = max_prompts
        self._most_tokens = most_tokens

    @property
    def turn_end(self) -> tuple[int, ...]:
        """Tokens that end an assistant's message in the chat template; see `ModelTokenizer.turn_end`."""
        return tuple(token for token in self.tokenizer.turn_end if token < self._vocab_size)

    @property
    def most_ids(self) -> int:
        """Most token ids of all prompts of a request, and one more of each."""
        return sys.maxsize if self._most_tokens is None else self._max_prompts * (self._most_tokens + 1)

    def read(self, prompt: Any, *, add_special_tokens: bool, name: str = "prompt") -> tuple[TokenPrompt, ...]:
        """Read text, token ids, or an array of either, as one or several prompts; none of them is empty.

        prompt: the value of the body's field `name`. Raises RequestError.
        """
        if not isinstance(prompt, list):
            return (self._one(prompt, add_special_tokens, name, name),)
        # An array of neither arrays nor strings: one prompt of token ids (or an empty one).
        if not prompt or not isinstance(prompt[0], list | str):
            return (self._ids_prompt(prompt, name, name),)
        if len(prompt) > self._max_prompts:
            asked = f"'{name}' holds {len(prompt)} prompts"
            raise RequestError(f"{asked}; at most {self._max_prompts} are allowed", name)
        return tuple(self._one(item, add_special_tokens, name, f"{name}[{index}]") for index, item in enumerate(prompt))

    def chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool, variables: Mapping[str, Any] | None
    ) -> TokenPrompt:
        """Render messages with the model's chat template and tokenize them as one prompt.

        Special tokens are part of the template, so the tokenizer adds none. Raises RequestError.
        """
        text = self.tokenizer.render_chat(messages, add_generation_prompt=add_generation_prompt, variables=variables)
        ids = self._encode(text, "messages", add_special_tokens=False)
        if not ids:
            raise RequestError("the chat template makes an empty prompt of 'messages'", "messages")
        return TokenPrompt.of(ids)

    def token_ids(self, value: Any, name: str) -> array[int]:
        """Read an array of token ids; it may be empty. name: the body's field. Raises RequestError."""
        if not isinstance(value, list):
            raise RequestError(f"'{name}' must be an array of token ids", name)
        if self._most_tokens is not None and len(value) > self._most_tokens:
            raise RequestError(f"'{name}' holds {len(value)} token ids; at most {self._most_tokens} are allowed", name)
        return self._checked(value, name, name)

    def text(self, text: str, *, add_special_tokens: bool, name: str = "prompt", label: str = "prompt") -> TokenPrompt:
        """Tokenize a text. label: what errors call it in the body's field `name`. Raises RequestError when empty."""
        if not text:
            raise RequestError(f"'{label}' is empty", name)
        ids = self._encode(text, name, add_special_tokens=add_special_tokens)
        if not ids:
            raise RequestError(f"'{label}' is empty: the text has no tokens", name)
        return TokenPrompt.of(ids)

    def _one(self, prompt: Any, add_special_tokens: bool, name: str, label: str) -> TokenPrompt:
        if isinstance(prompt, list):
            return self._ids_prompt(prompt, name, label)
        if not isinstance(prompt, str):
            raise RequestError(f"'{label}' must be text or an array of token ids", name)
        return self.text(prompt, add_special_tokens=add_special_tokens, name=name, label=label)

    def _encode(self, text: str, name: str, *, add_special_tokens: bool) -> array[int]:
        """Tokenize a text of the body's field `name`. Raises RequestError."""
        try:
            return self.tokenizer.encode_long(
                text, add_special_tokens=add_special_tokens, most_tokens=self._most_tokens
            )
        except RequestError as error:
            raise RequestError(str(error), name) from None

    def _ids_prompt(self, value: list[Any], name: str, label: str) -> TokenPrompt:
        ids = self._checked(value, name, label)
        if not ids:
            raise RequestError(f"'{label}' is empty", name)
        return TokenPrompt.of(ids)

    def _checked(self, value: list[Any], name: str, label: str) -> array[int]:
        """Return the ids as int32. Raises RequestError that names the first item that is none."""
        # The types first: in Python true is a number.
        if not value or (set(map(type, value)) == {int} and min(value) >= 0 and max(value) < self._vocab_size):
            return array("i", value)
        at = next(i for i, each in enumerate(value) if type(each) is not int or not 0 <= each < self._vocab_size)
        raise RequestError(f"'{label}' at [{at}] must be a token id in 0..{self._vocab_size - 1}", name)
