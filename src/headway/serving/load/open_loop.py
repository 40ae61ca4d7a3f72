"""Open-loop load: every request is sent when it is due, however many are still open. None is dropped."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from headway.serving.load.client import LoadClient, LoadRequest
from headway.sim.metrics import RequestRecord


@dataclass(frozen=True)
class LoadResult:
    """Result of a load run."""

    records: list[RequestRecord]
    """One per request, in order."""
    interrupted: bool = False
    """Whether the run was stopped before its end."""


async def run_open_loop(
    client: LoadClient,
    jobs: Iterable[LoadRequest],
    on_sent: Callable[[], None] = lambda: None,
    on_done: Callable[[RequestRecord], None] = lambda record: None,
) -> LoadResult:
    """Send each job at its `due_s`, ascending, on the client's clock (which starts at zero here).

    Requests are taken from the iterator one ahead of their time, so that long prompts are not all held at once. When
    the task is cancelled (Ctrl-C), open requests are recorded as cancelled, the remaining ones as not sent. on_sent and
    on_done: called at each request's start and end.
    """
    client.restart_clock()
    tasks: list[asyncio.Task[RequestRecord]] = []
    source = iter(jobs)
    unsent: list[RequestRecord] = []
    interrupted = False

    async def follow(job: LoadRequest) -> RequestRecord:
        record = await client.send(job)
        on_done(record)
        return record

    job: LoadRequest | None = None
    try:
        for job in source:
            # A late client sends at once and never skips: the delay is part of the latency and of `send_lag`.
            await asyncio.sleep(max(0.0, job.due_s - client.now()))
            tasks.append(asyncio.create_task(follow(job)))
            job = None
            on_sent()
        await asyncio.wait(tasks) if tasks else None
    except asyncio.CancelledError:
        interrupted = True
        # The request that was waiting for its time, then those that are still in the iterator.
        unsent = [not_sent(left) for left in ([job] if job is not None else [])]
        unsent += [not_sent(left) for left in source]
        await asyncio.sleep(0)  # a task must have begun for its cancellation to end in a record
        for task in tasks:
            task.cancel()
    records = list(await asyncio.gather(*tasks)) + unsent
    return LoadResult(records, interrupted)


def not_sent(job: LoadRequest) -> RequestRecord:
    """Return the record of a request that was not sent."""
    return RequestRecord(
        id=job.id,
        klass=job.klass,
        arrival_s=job.due_s,
        prompt_tokens=job.prompt_tokens,
        slo=job.slo,
        error="not sent: the run was stopped",
    )
