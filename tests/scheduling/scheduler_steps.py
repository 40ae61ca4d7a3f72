"""A scheduler, its requests, and its batches one at a time."""

from __future__ import annotations

from tests.helpers.unit_latency import small_machine

from headway.core.batch import Batch, RequestProgress
from headway.core.request import Request, Span
from headway.kv.block_manager import BlockManager
from headway.policy.iteration.config import SchedulerConfig
from headway.policy.iteration.scheduler import Scheduler


def make_scheduler(pool: int = 1600, model: object = None, mode: str = "default", **fields: object) -> Scheduler:
    config = SchedulerConfig.named(mode, **{"t_target_s": 0.02, **fields})
    return Scheduler(config, model or small_machine(), BlockManager(pool, 16))


def add_request(
    scheduler: Scheduler, name: str, prompt: int, output: int = 4, now: float = 0.0, **fields: object
) -> None:
    request = Request(id=name, arrival_s=now, prompt_tokens=prompt, max_output_tokens=output, **fields)
    scheduler.add(Span.whole(request), now)


def chunks(batch: Batch | None) -> list[tuple[str, int, int]]:
    assert batch is not None
    return [(chunk.request, chunk.start, chunk.tokens) for chunk in batch.parts[0].prefills]


def step(scheduler: Scheduler, now: float = 0.0, *finished: str) -> Batch:
    batch = scheduler.schedule(now)
    assert batch is not None
    scheduler.complete(batch.id, [RequestProgress(name, 1, True) for name in finished], now)
    scheduler.check()
    return batch
