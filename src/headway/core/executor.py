"""The seam between deciding and computing: what the engine's loop asks of whoever runs the model.

Plans carry deltas only. A prompt is handed over once (`admit`); after that an executor knows a request by its id,
keeps its tokens, and replays the KV operations of each batch on its own copy of the block tables. Who should not call
this: policies and servers. Test double: `tests/engine/fake_executor.py`. The simulator has its own.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from headway.core.batch import Batch
from headway.core.sampling import SamplingParams, TokenLogprobs


class EmittedToken(NamedTuple):
    """The token that an iteration drew for a request."""

    request: str
    token: int
    logprobs: TokenLogprobs | None


class StepResult(NamedTuple):
    """A batch has been carried out. One entry for each decode and each finished prompt.

    `elapsed_s` is what it took, of several stages or groups the slowest. `stages`, for each of the batch's parts: when
    each pipeline stage began and ended it, seconds of CLOCK_MONOTONIC on the stage's host (empty: not measured).
    """

    batch_id: int
    emitted: list[EmittedToken]
    elapsed_s: float
    stages: tuple[tuple[tuple[float, float], ...], ...] = ()


class Executor(Protocol):
    """Carries out batches in the order in which they are submitted."""

    @property
    def waits_on(self) -> tuple[Any, ...]:
        """What a `zmq.Poller` may wait on while batches are in flight: `result` may then have something. Empty for an
        executor that computes in `submit`."""

    @property
    def accepts(self) -> bool:
        """Whether the next batch would begin at once (stage 0 is free). One made earlier might delay a new request."""

    @property
    def free(self) -> tuple[int, ...] | None:
        """Of several KV groups, those whose first stage would begin a batch at once. None: all."""

    def admit(
        self,
        request_id: str,
        prompt: memoryview,
        params: SamplingParams,
        output: tuple[int, ...] = (),
        kept: bool = False,
    ) -> None:
        """A new request's prompt (int32, little-endian, validated) and how to sample for it. Before its first batch.
        `output`: what it has generated already, elsewhere; batches count it as known. kept: KV that lies here under its
        id already is its own."""

    def submit(self, batch: Batch) -> None:
        """Begin a batch. Requests that its KV operations free and that are `forget`-ed need no further care."""

    def result(self, timeout_s: float | None) -> StepResult | None:
        """The next finished batch, in order; None when none finished within `timeout_s`. Raises LostError until
        `recover`, whether batches are in flight or not; no other method does."""

    def recover(self) -> None:
        """After a LostError: begin again, without KV and with nothing in flight. Live requests stay admitted, with what
        they have generated. Until `accepts`, calls of `result` carry the restart on; it may be lost again."""

    def forget(self, request_id: str) -> None:
        """The request has ended; its tokens may be dropped once batches in flight are done."""

    def close(self) -> None:
        """Free everything. Called once."""
