"""What each instance of a live cluster has cached, as its engine has reported: keys of blocks (`kv.prefix_index`)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from headway.kv.prefix_index import KEY_BYTES, TextKeys
from headway.runtime.cluster.cluster_request import ClusterRequest
from headway.runtime.engine.protocol import CacheChanges


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
        # Only ends of prefixes are evicted: a cached block's ancestors are cached too.
        return bisect_left(keys, True, key=lambda key: key not in self._keys)


def prompt_keys(asked: ClusterRequest, block_tokens: int) -> list[bytes]:
    """Return the keys of the blocks that a request could take from a cache; empty: it takes none.

    What its client has of the answer is part of the prompt."""
    submit = asked.submit
    if not submit.prefix_cache or submit.params.prompt_logprobs is not None:
        return []
    text = TextKeys(asked.prompt, block_tokens, submit.cache_salt)
    for token in asked.told:
        text.append(token)
    # The last token is always computed.
    return text.keys[: (submit.prompt_tokens + len(asked.told) - 1) // block_tokens]


def _split(keys: bytes) -> list[bytes]:
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]
