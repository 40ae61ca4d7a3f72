"""The executor of a single process: runs each batch at once, in the caller's thread."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from headway.core.batch import Batch, KvOp, StepResult
from headway.core.request import SamplingParams
from headway.runtime.executor.measure import ComputeThreads
from headway.runtime.executor.worker import ModelWorker


class SingleProcessExecutor:
    """`Executor` over one `ModelWorker`. `submit` blocks for the iteration; `result` never does."""

    waits_on: tuple[Any, ...] = ()
    accepts = True
    free = None

    def __init__(self, worker: ModelWorker, team: ComputeThreads | None = None) -> None:
        self.worker, self._team = worker, team
        self._done: deque[StepResult] = deque()

    def admit(
        self,
        request_id: str,
        prompt: memoryview,
        params: SamplingParams,
        output: tuple[int, ...] = (),
        kept: bool = False,
    ) -> None:
        self.worker.admit(request_id, prompt.nbytes // 4, prompt, params, output)

    def submit(self, batch: Batch) -> None:
        started = ended = time.monotonic()
        part = batch.parts[0]
        if self._team is not None:
            self._team.begin(started, self.worker.work_rows(part))
        try:
            self.worker.replay(part.kv_ops)
            emitted = self.worker.run(part)
        finally:
            ended = time.monotonic()
            if self._team is not None:
                self._team.end(ended)
        self._done.append(StepResult(batch.id, emitted, ended - started, (((started, ended),),)))

    def replay(self, ops: tuple[KvOp, ...]) -> None:
        """Carry out KV operations without a batch, ahead of the next batch."""
        self.worker.replay(ops)

    def result(self, timeout_s: float | None) -> StepResult | None:
        return self._done.popleft() if self._done else None

    def recover(self) -> None:
        """Never called: this executor has no workers to lose apart from the engine's process."""

    def forget(self, request_id: str) -> None:
        self.worker.forget(request_id)

    def close(self) -> None:
        """Nothing to close: memory is released with the process."""
