"""Prepared documents as text: what a request that names one begins with."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from headway.core.errors import RequestError


class ContextRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One prepared document: either messages or a prompt."""

    id: str
    owner: str
    """A hash of its client's API key; empty without one."""
    model: str
    """The name by which its client called the model."""
    tokens: int
    created: float
    """Unix time."""
    ttl_s: float
    cache_salt: str | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    prompt: msgspec.Raw = msgspec.Raw(b"null")
    """JSON: text, or an array of token ids; null beside messages."""

    @property
    def left_s(self) -> float:
        """Seconds until its deadline."""
        return self.created + self.ttl_s - time.time()

    def before(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """Return a chat's messages behind the document's. Raises RequestError for a document that is a prompt."""
        if self.messages is None:
            raise RequestError(f"the context {self.id!r} is a prompt: name it in /v1/completions", "context_id")
        return (*self.messages, *messages)

    def continued(self, prompt: Any) -> Any:
        """Return a prompt behind the document's. Raises RequestError unless both are text, or both token ids."""
        if self.messages is not None:
            raise RequestError(f"the context {self.id!r} is of messages: name it in a chat", "context_id")
        first = msgspec.json.decode(self.prompt)
        if isinstance(first, str) != isinstance(prompt, str) or not _is_flat(prompt):
            kind = "text" if isinstance(first, str) else "an array of token ids"
            raise RequestError(f"'prompt' must be {kind}, as the context {self.id!r} is", "prompt")
        return first + prompt

    def check_salt(self, given: str | None) -> None:
        """Raise RequestError for a salt of the request that is not the document's."""
        if given is not None and given != self.cache_salt:
            raise RequestError(
                f"'cache_salt' is not that of the context {self.id!r}: leave it out, the context's is used",
                "cache_salt",
            )


def _is_flat(prompt: object) -> bool:
    """Whether a decoded prompt is one text or one array of numbers."""
    return isinstance(prompt, str) or (isinstance(prompt, list) and all(isinstance(each, int) for each in prompt))
