"""What the server computes for clients at this moment, so that its end can be told to all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from headway.core.errors import UnavailableError

T = TypeVar("T")


def cut_off() -> UnavailableError:
    """What a client is told whose request the server's end has cut off."""
    return UnavailableError("the server is ending; send the request again later", 5.0)


class ActiveTasks:
    """The tasks that make answers. Once `cut` was called they end, and so does each that begins later: whoever waits
    for one that was cancelled answers with `cut_off`. On the event loop only."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._over = False

    def begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task that `cut` may cancel, though not before its first step."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if self._over:
            asyncio.get_running_loop().call_soon(task.cancel)
        return task

    def cut(self) -> None:
        """End all of them. Harmless when repeated."""
        self._over = True
        for task in self._tasks:
            asyncio.get_running_loop().call_soon(task.cancel)
