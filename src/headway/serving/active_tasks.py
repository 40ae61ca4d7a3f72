"""The tasks that are computing answers, so that the server's shutdown can cancel all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from headway.core.errors import UnavailableError

T = TypeVar("T")


def server_ending_error() -> UnavailableError:
    """Return the error for a client whose request the shutdown interrupted."""
    return UnavailableError("the server is ending; send the request again later", 5.0)


class ActiveTasks:
    """A set of running tasks, which `cancel` ends, tasks begun later included.

    The awaiter of a cancelled task answers with `server_ending_error`. Used on the event loop only.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._cancelled = False

    def begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run `work` as a task; `cancel` cancels it, but not before its first step."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # call_soon runs after the task's first step: a coroutine cancelled before it would skip its own cleanup.
        if self._cancelled:
            asyncio.get_running_loop().call_soon(task.cancel)
        return task

    def cancel(self) -> None:
        """Cancel all tasks, and every task begun from now on. Idempotent."""
        self._cancelled = True
        for task in self._tasks:
            asyncio.get_running_loop().call_soon(task.cancel)
