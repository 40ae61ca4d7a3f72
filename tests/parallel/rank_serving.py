"""An engine core over any executor, and what a tiny model says by other means."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from tests.helpers.greedy_reference import GreedyReference
from tests.helpers.unit_latency import Linear

from headway.core.batch import Executor, ManualClock
from headway.core.logs import EventSink
from headway.core.request import SamplingParams
from headway.kv.block_manager import BlockManager
from headway.perf.latency.base import Seconds
from headway.policy.iteration.admission import make_prefix_cache
from headway.policy.iteration.config import SchedulerConfig
from headway.policy.iteration.groups import make_scheduler
from headway.runtime.engine.core import EngineCore
from headway.runtime.engine.protocol import EngineInfo, OutputDelta, SubmitRequest


class RowLatency(Linear):
    """1 ms, 0.1 ms a row, and 0.2 µs a row and past token: adaptive chunks shrink along a prompt."""

    def chunk_s(self, past: int, first: int, last: int) -> Seconds:
        return 2e-7 * past * np.arange(first, last + 1, dtype=np.float64)


@dataclass
class Ask:
    """One request of a test."""

    prompt: list[int]
    count: int
    after: int = 0
    params: dict[str, Any] = field(default_factory=dict)


def make_core(
    executor: Executor, blocks: int = 64, block_tokens: int = 8, log: EventSink | None = None, cached: bool = False,
    **scheduler: Any,
) -> EngineCore:  # fmt: skip
    """cached: with a prefix cache."""
    info = EngineInfo(
        model="t", architecture="t", dtype="float32", device="cpu", max_model_len=512, context_tokens=512,
    vocab_size=128,
        kv_tokens_total=blocks * block_tokens, kv_block_tokens=block_tokens, policy="lars", chunking="adaptive",
        mode="default", t_target_s=0.02, max_num_seqs=64, max_queued_requests=1000, parameters=1, weights_bytes=4,
        kv_bytes=4,
    )  # fmt: skip
    config = SchedulerConfig.named("default", **{"t_target_s": 0.005, "min_chunk": 1, **scheduler})
    latency = RowLatency(1e-4, 1e-3)
    block_managers = [
        BlockManager(
            blocks * block_tokens, block_tokens, make_prefix_cache("lru", latency, block_tokens) if cached else None
        )
        for _ in range(config.kv_parallel)
    ]
    return EngineCore(make_scheduler(config, latency, block_managers), executor, ManualClock(), info, log)


def serve(
    core: EngineCore, asks: list[Ask], steps: int = 20_000, hear: Callable[[OutputDelta], object] = id,
    wait_s: float | None = None, on_step: Callable[[dict[str, list[int]]], object] = id,
) -> list[list[int]]:  # fmt: skip
    """All answers, greedy unless an ask says otherwise. `after`: steps of the engine before it is submitted. `hear` is
    called with every delta, `on_step` before every step with what has been told. wait_s: of a step; None: it waits for
    a whole batch, as the live service does not."""
    told: dict[str, list[int]] = {str(i): [] for i in range(len(asks))}
    waiting = dict(enumerate(asks))
    ended = 0
    for step in range(steps):
        for index, ask in list(waiting.items()):
            if ask.after <= step:
                del waiting[index]
                params = SamplingParams(
                    **{"max_tokens": ask.count, "temperature": 0.0, "ignore_eos": True, **ask.params}
                )
                submit = SubmitRequest(id=str(index), prompt_tokens=len(ask.prompt), params=params, received_s=0.0)
                refused = core.submit(submit, memoryview(np.array(ask.prompt, dtype=np.int32).tobytes()))
                assert refused is None, refused
        on_step(told)
        for delta in core.step(wait_s):
            assert delta.error is None, delta
            hear(delta)
            told[delta.id] += delta.tokens
            ended += delta.finish is not None
        core.scheduler.check()
        if ended == len(asks):
            assert core.idle
            return [told[str(i)] for i in range(len(asks))]
    raise AssertionError("the engine does not come to an end")


@cache
def reference(folder: Path) -> GreedyReference:
    return GreedyReference(folder)


def greedy(folder: Path, prompt: list[int], count: int) -> list[int]:
    """By transformers, the whole prompt at once."""
    return reference(folder).tokens(prompt, count)
