"""The client's side of a request of a cluster: the deltas that wait for it, and its time-out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from headway.runtime.engine.protocol import OutputDelta, SubmitRequest
from headway.runtime.engine.rejections import rejection_error


class AnswerQueue:
    """Deltas of one request on their way to its client."""

    def __init__(self) -> None:
        self._items: asyncio.Queue[OutputDelta | Exception] = asyncio.Queue()

    def put(self, item: OutputDelta | Exception) -> None:
        """Append a delta, or the error that the request failed with. Nothing follows the last delta or an error."""
        self._items.put_nowait(item)

    async def get(self) -> OutputDelta:
        """Return the next delta, once there is one. Raises the error that the request failed with."""
        item = await self._items.get()
        if isinstance(item, Exception):
            raise item
        if (error := rejection_error(item)) is not None:
            raise error
        return item


@contextmanager
def time_limit(submit: SubmitRequest, expire: Callable[[], None]) -> Iterator[None]:
    """Call `expire` when a request's time-out has passed since its arrival, if it has one, and not after the block."""
    timer: asyncio.TimerHandle | None = None
    if submit.timeout_s is not None:
        timer = asyncio.get_running_loop().call_at(submit.received_s + submit.timeout_s, expire)
    try:
        yield
    finally:
        if timer is not None:
            timer.cancel()
