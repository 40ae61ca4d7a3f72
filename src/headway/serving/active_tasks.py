"""The tasks that compute answers at this moment, so that the server's end can cancel all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from headway.core.errors import UnavailableError

T = TypeVar("T")


def server_ending_error() -> UnavailableError:
    """The error that a client gets whose request the server's end has interrupted."""
    return UnavailableError("the server is ending; send the request again later", 5.0)


class ActiveTasks:
    """A set of running tasks. After `cancel` they end, and so does each that begins later; what awaits a cancelled one
    answers with `server_ending_error`. On the event loop only."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._cancelled = False

    def begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task that `cancel` may cancel, though not before its first step."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if self._cancelled:
            asyncio.get_running_loop().call_soon(task.cancel)
        return task

    def cancel(self) -> None:
        """End all of them. Harmless when repeated."""
        self._cancelled = True
        for task in self._tasks:
            asyncio.get_running_loop().call_soon(task.cancel)
