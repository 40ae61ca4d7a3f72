"""What each instance of a live cluster has cached: keys of blocks (`kv.text_keys`), as engines report them, or as
follows from what was sent to a server that reports nothing."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Container, Sequence

from headway.kv.text_keys import KEY_BYTES, TextKeys
from headway.runtime.engine.protocol import CacheChanges, SubmitRequest

ASSUMED_BLOCK = 64
"""Tokens of a block where the server's own are not known."""


class CachedKeys:
    """Keys of the blocks that one instance has cached. Its reports come with its outputs, at least ten times a second
    while it computes."""

    def __init__(self) -> None:
        self._keys: set[bytes] = set()

    def take(self, changes: CacheChanges) -> None:
        """Take in a report."""
        self._keys.difference_update(_split(changes.evicted))
        self._keys.update(_split(changes.cached))

    def clear(self) -> None:
        """Forget all: the process is gone."""
        self._keys.clear()

    def match(self, keys: Sequence[bytes]) -> int:
        """Return how many blocks of a prompt are cached."""
        return _match(keys, self._keys)


class AssumedKeys:
    """Keys of the texts that were sent to a server or came from it, the least recently used forgotten first."""

    def __init__(self) -> None:
        # Oldest first.
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def use(self, keys: Sequence[bytes], kv_tokens: int) -> None:
        """Note that a text is computed there. kv_tokens: of its KV cache, which holds no more."""
        # The ends of texts first: what is forgotten first is never in the middle of one.
        for key in reversed(keys):
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > kv_tokens // ASSUMED_BLOCK:
            self._keys.popitem(last=False)

    def clear(self) -> None:
        """Forget all: the server is gone."""
        self._keys.clear()

    def match(self, keys: Sequence[bytes]) -> int:
        """Return how many blocks of a prompt are assumed to be cached."""
        return _match(keys, self._keys)


def text_of(
    submit: SubmitRequest,
    prompt: bytes | memoryview,
    told: Sequence[int],
    block_tokens: int,
    salt: str | None = None,
) -> TextKeys:
    """Return the keys of a request's prompt and of what its client has of the answer; none of one that shares none.

    salt: None: the request's own."""
    text = TextKeys(prompt if shares(submit) else b"", block_tokens, submit.cache_salt if salt is None else salt)
    for token in told if shares(submit) else ():
        text.append(token)
    return text


def shares(submit: SubmitRequest) -> bool:
    """Return whether a request uses and leaves cached prefixes. Scores of its prompt need logits, which KV has not."""
    return submit.prefix_cache and submit.params.prompt_logprobs is None


def shareable(text: TextKeys, tokens: int, block_tokens: int) -> list[bytes]:
    """Return the keys of a prompt of so many tokens that may be taken from a cache: its last token is computed."""
    return text.keys[: (tokens - 1) // block_tokens]


def _match(keys: Sequence[bytes], known: Container[bytes]) -> int:
    # Only ends of prefixes are evicted: a cached block's ancestors are cached too.
    return bisect_left(keys, True, key=lambda key: key not in known)


def _split(keys: bytes) -> list[bytes]:
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]
