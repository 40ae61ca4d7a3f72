"""A bound on the memory that tokenisation takes at one time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from headway.core.errors import RequestError

BYTES_PER_CHARACTER = 512
"""Memory that tokenising one character takes at most, about: measured, 85 to 400 bytes."""
UNCOUNTED_CHARACTERS = 64 << 10
"""Texts up to this length are not counted: each thread tokenises one at a time."""


class TokenizingMemory:
    """Memory for texts that cannot be cut. Used by several threads.

    limit: bytes of all that are tokenised at one time.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._free = limit
        self._changed = threading.Condition()

    @contextmanager
    def hold(self, characters: int) -> Iterator[None]:
        """Wait for the memory that a text of that length takes, and hold it meanwhile.

        Raises RequestError for a text that takes more than all of it.
        """
        if characters <= UNCOUNTED_CHARACTERS:
            yield
            return
        wanted = characters * BYTES_PER_CHARACTER
        if wanted > self._limit:
            raise RequestError(
                f"the text has {characters} characters in a row that can only be tokenised at once; this server's "
                f"memory for that allows {self._limit // BYTES_PER_CHARACTER}: send token ids, or text with spaces",
                "prompt",
            )
        with self._changed:
            self._changed.wait_for(lambda: self._free >= wanted)
            self._free -= wanted
        try:
            yield
        finally:
            with self._changed:
                self._free += wanted
                self._changed.notify_all()
