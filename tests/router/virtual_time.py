"""An event loop whose clock jumps to the next timer instead of waiting for it: hours of pauses cost nothing, and a run
is the same every time.

For code that reads the loop's time, or a clock that is given to it (`loop_time`), and meets only fakes: threads,
processes and sockets that need real time to answer would find their time-outs passed.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class _JumpingSelector(selectors.DefaultSelector):
    """Reports what is ready now; a time-out moves `now_s` instead of passing."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise AssertionError("every task waits, and no timer is set: nothing can happen any more")
        ready = super().select(0)
        if not ready:
            # Not less than the loop's resolution, or rounding could leave a timer due for ever.
            self.now_s += max(timeout, 1e-9) if timeout > 0 else 0.0
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """A loop in virtual seconds."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s


def run(main: Coroutine[Any, Any, Any]) -> Any:
    """`asyncio.run` in virtual time. Raises AssertionError when every task waits for ever."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)


def loop_time() -> float:
    """The running loop's time in seconds: a clock to give to what is under test."""
    return asyncio.get_running_loop().time()


async def pause(seconds: float) -> None:
    """Let virtual time pass. For fakes and tests that run in it."""
    assert isinstance(asyncio.get_running_loop(), VirtualTimeLoop), "run it with tests.router.virtual_time.run"
    await asyncio.sleep(seconds)
