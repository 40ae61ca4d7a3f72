"""Tasks that compute answers: cancelled together at shutdown, merged in order of arrival."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
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


_BACKLOG = 64


async def merged(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Yield (index of the source, item) until all sources have ended; the first error or closing ends all of them.

    All sources are started at once. At most `_BACKLOG` items are queued: a slow reader slows the sources.
    """
    # The common case needs no task and no queue.
    if len(sources) == 1:
        async with aclosing(sources[0]) as only:
            async for item in only:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, T] | BaseException | None] = asyncio.Queue(_BACKLOG)

    # Puts the source's items, then None at its end or the exception that ended it.
    async def forward(index: int, source: AsyncGenerator[T, None]) -> None:
        end: BaseException | None = None
        try:
            async with aclosing(source):
                async for item in source:
                    await queue.put((index, item))
        except Exception as error:  # raised again by the reader
            end = error
        # Not reached on cancellation: then nothing reads the queue any more.
        await queue.put(end)

    tasks = [asyncio.create_task(forward(index, source)) for index, source in enumerate(sources)]
    try:
        running = len(tasks)
        while running:
            got = await queue.get()
            if got is None:
                running -= 1
            elif isinstance(got, BaseException):
                raise got
            else:
                yield got
    finally:
        await cancel_all(tasks)


async def cancel_all(tasks: Sequence[asyncio.Task[object]] | Sequence[asyncio.Task[None]]) -> None:
    """Cancel all tasks and wait until each has finished its cleanup. Their exceptions are ignored."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
