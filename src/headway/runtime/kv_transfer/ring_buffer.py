"""Allocation of a shared buffer as a ring: which bytes are in use, and when they may be written again.

Places are taken one after another and leave in messages, in whatever order. Whoever reads them says how many messages
it has read in all, and needs to say so only when that makes a quarter (`due`): a body of at most a quarter (`most`)
finds room as soon as everything before it has been read.
"""

from __future__ import annotations

from collections import deque

_ALIGNED = 64
"""Places begin at cache lines."""


def most(size: int) -> int:
    """The largest body that has a place in an arena of so many bytes."""
    return size // 4 // _ALIGNED * _ALIGNED


def aligned(size: int) -> int:
    """What a body of so many bytes takes."""
    return -(-size // _ALIGNED) * _ALIGNED


class BufferRange:
    """Bytes [at, end)."""

    __slots__ = ("at", "end", "free")

    def __init__(self, at: int, end: int) -> None:
        self.at, self.end, self.free = at, end, False


class RingBuffer:
    """The writer's side of a ring of `size` bytes.

    For one thread at a time.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._taken: deque[BufferRange] = deque()
        self._away: deque[BufferRange] = deque()
        self._read = 0

    @property
    def bytes(self) -> int:
        """How many are taken."""
        return sum(taken.end - taken.at for taken in self._taken if not taken.free)

    def take(self, size: int) -> BufferRange | None:
        """A place for so many bytes; None: there is none now."""
        size = aligned(size)
        low, high = (self._taken[0].at, self._taken[-1].end) if self._taken else (0, 0)
        # Not wrapped: free are [high, size) and [0, low). Wrapped: only [high, low). A range never wraps itself.
        if not self._taken or high > low:
            fits = high + size <= self._size
            at, until = (high, self._size) if fits else (0, low)
        else:
            at, until = high, low
        if at + size > until:
            return None
        self._taken.append(BufferRange(at, at + size))
        return self._taken[-1]

    def leave(self, taken: BufferRange) -> None:
        """It goes in the next message."""
        self._away.append(taken)

    def drop(self, taken: BufferRange) -> None:
        """It goes in no message after all."""
        if taken in self._away:
            self._away.remove(taken)
        self._free(taken)

    def read(self, messages: int) -> None:
        """So many messages have been read in all. Raises ValueError when so many cannot have been."""
        if not 0 <= messages - self._read <= len(self._away):
            raise ValueError(f"{messages} messages read, of {self._read + len(self._away)}")
        for _ in range(messages - self._read):
            self._free(self._away.popleft())
        self._read = messages

    def _free(self, taken: BufferRange) -> None:
        # Ranges free up in any order, but only the oldest ones give their bytes back.
        taken.free = True
        while self._taken and self._taken[0].free:
            self._taken.popleft()


class RingReader:
    """The reader's count of released bytes. `due`: the writer is to be told.

    `due`: it has to be told.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._untold = 0
        self.messages = 0

    def read(self, size: int) -> bool:
        """A message with a body of so many bytes has been read; whether to tell now."""
        self.messages += 1
        self._untold += aligned(size)
        due = self._untold >= most(self._size)
        if due:
            self._untold = 0
        return due
