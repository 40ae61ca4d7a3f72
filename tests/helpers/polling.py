"""Wait for a condition instead of for a time: every few milliseconds until it holds, and an error when it does not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


def until(condition: Callable[[], object], timeout_s: float = 60.0, what: str = "it did not happen") -> None:
    """Return once `condition()` is true. AssertionError after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


async def eventually(condition: Callable[[], object], timeout_s: float = 30.0, what: str = "it did not happen") -> None:
    """`until`, while the event loop goes on."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while not condition():
        assert loop.time() < deadline, what
        await asyncio.sleep(0.001)
