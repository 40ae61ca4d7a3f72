"""Merging several asynchronous generators into one, in order of arrival."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")

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
