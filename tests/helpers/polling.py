"""Wait for a condition instead of for a time: every few milliseconds until it holds, and an error when it does not.

Where there is no condition to wait for: `run_ready_tasks` inside an event loop, `let_arrive` towards another process.
"""

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


async def run_ready_tasks(turns: int = 50) -> None:
    """Let all tasks go on that can without time passing: so many turns of the event loop."""
    for _ in range(turns):
        await asyncio.sleep(0)


def let_arrive(seconds: float = 0.1) -> None:
    """Give other processes and threads the time to take in what was sent, where nothing shows that they have.

    A test may need it to meet the case that it is about, never to pass.
    """
    time.sleep(seconds)
