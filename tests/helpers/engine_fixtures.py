"""An engine core on the fake executor, and requests for it."""

from __future__ import annotations

import numpy as np
from tests.helpers.fake_executor import VOCAB, FakeExecutor
from tests.helpers.unit_latency import Linear

from headway.core.batch import ManualClock
from headway.core.logs import EventSink
from headway.core.request import SamplingParams
from headway.kv.block_manager import BlockManager
from headway.policy.iteration.config import SchedulerConfig
from headway.policy.iteration.scheduler import Scheduler
from headway.runtime.engine.core import EngineCore
from headway.runtime.engine.protocol import EngineInfo, OutputDelta, SubmitRequest

EOS = 2
INFO = EngineInfo(
    model="fake", architecture="fake", dtype="float32", device="cpu", max_model_len=512, context_tokens=512,
    vocab_size=VOCAB,
    kv_tokens_total=1024, kv_block_tokens=16, policy="lars", chunking="adaptive", mode="default", t_target_s=0.02,
    max_num_seqs=64, max_queued_requests=8, parameters=1, weights_bytes=4, kv_bytes=4, eos_token_ids=(EOS,),
)  # fmt: skip


ROWS = Linear(1e-4, 1e-3)
"""1 ms and 0.1 ms a row."""


def make_core(
    executor: FakeExecutor | None = None, info: EngineInfo = INFO, log: EventSink | None = None, **fields: object
) -> EngineCore:
    """An engine on a manual clock."""
    executor = executor or FakeExecutor()
    config = SchedulerConfig.named("default", **{"t_target_s": 0.02, **fields})
    block_manager = BlockManager(executor.blocks * executor.block_tokens, executor.block_tokens)
    return EngineCore(Scheduler(config, ROWS, block_manager), executor, ManualClock(), info, log)


def frame(tokens: list[int]) -> memoryview:
    return memoryview(np.array(tokens, dtype=np.int32).tobytes())


def submit(
    core: EngineCore, name: str, prompt: list[int], timeout_s: float | None = None, **params: object
) -> OutputDelta | None:
    """Submit now; the answer is the refusal, or None."""
    message = SubmitRequest(
        id=name,
        prompt_tokens=len(prompt),
        params=SamplingParams(**{"max_tokens": 4, **params}),
        received_s=core._clock.now(),
        timeout_s=timeout_s,
    )
    return core.submit(message, frame(prompt))


class Heard:
    """What clients were told, by request."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.last: dict[str, OutputDelta] = {}

    def hear(self, deltas: list[OutputDelta]) -> None:
        for delta in deltas:
            assert delta.id not in self.last, "nothing follows the end of an answer"
            self.tokens.setdefault(delta.id, []).extend(delta.tokens)
            if delta.finish is not None:
                self.last[delta.id] = delta


def run(core: EngineCore, heard: Heard | None = None, steps: int = 10_000) -> Heard:
    """Step until idle."""
    heard = heard or Heard()
    while not core.idle:
        heard.hear(core.step())
        core.scheduler.check()
        steps -= 1
        assert steps > 0, "the engine does not come to an end"
    return heard
