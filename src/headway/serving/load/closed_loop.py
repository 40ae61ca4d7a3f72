"""Closed-loop sessions: a turn is sent when the answer before it has ended and its think time is over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from headway.serving.load.client import LoadClient, LoadRequest
from headway.serving.load.open_loop import LoadResult, not_sent
from headway.serving.load.text_prompts import TextPrompts
from headway.sim.metrics import RequestRecord
from headway.sim.workload import TraceRequest


async def run_closed_loop(
    client: LoadClient,
    requests: Sequence[TraceRequest],
    prompts: TextPrompts,
    make: Callable[[int, TraceRequest, bytes, float], LoadRequest],
    on_sent: Callable[[], None] = lambda: None,
    on_done: Callable[[RequestRecord], None] = lambda record: None,
) -> LoadResult:
    """Play sessions (`transforms.close_sessions`) and return one record per request, in their order.

    A failed turn is followed by the next one. `make`: returns what to send, from the request's number, the request, its
    prompt as JSON and its due time on the client's clock, which starts at zero here. When the task is cancelled, open
    requests are recorded as cancelled and the others as not sent."""
    client.restart_clock()
    threads: dict[tuple[str | None, str], list[int]] = {}
    for number, request in enumerate(requests):
        threads.setdefault((request.session, request.thread), []).append(number)
    records: dict[int, RequestRecord] = {}

    async def play(numbers: Sequence[int]) -> None:
        ended_s = 0.0
        for number in numbers:
            request = requests[number]
            due_s = ended_s + (request.think_s or 0.0) if request.waits else request.arrival_s
            await asyncio.sleep(max(0.0, due_s - client.now()))
            job = make(number, request, prompts.prompt(request), due_s)
            on_sent()
            # A cancelled request has a record too: `send` does not raise.
            record = records[number] = await client.send(job)
            if job.answer_ids:
                prompts.answered(request, job.answer_ids)
            on_done(record)
            if (task := asyncio.current_task()) is not None and task.cancelling():
                return
            ended_s = client.now()

    stopped = False
    try:
        async with asyncio.TaskGroup() as group:
            for numbers in threads.values():
                group.create_task(play(numbers))
    except asyncio.CancelledError:
        stopped = True
    left = (number for number in range(len(requests)) if number not in records)
    for number in left:
        records[number] = not_sent(make(number, requests[number], b"", requests[number].arrival_s))
    return LoadResult([records[number] for number in range(len(requests))], stopped)
