"""Protocol between the engine's loop, which decides, and the executor, which runs the model.

Batches carry deltas only. A prompt is passed once (`admit`); after that an executor identifies a request by its id,
stores its tokens, and replays the KV operations of each batch on its own copy of the block tables. Called by the engine
only, not by policies or servers. Test double: `tests/engine/fake_executor.py`. The simulator has its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from headway.core.batch import Batch
from headway.core.sampling import SamplingParams, TokenLogprobs


class EmittedToken(NamedTuple):
    """The token that an iteration drew for a request."""

    request: str
    token: int
    logprobs: TokenLogprobs | None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    """Of the prompt's second token and those after it, with the request's first token, where they were asked for."""


class StepResult(NamedTuple):
    """Result of a completed batch."""

    batch_id: int
    emitted: list[EmittedToken]
    """One entry for each decode and each finished prompt."""
    elapsed_s: float
    """Measured seconds, of several stages or groups the slowest."""
    stages: tuple[tuple[tuple[float, float], ...], ...] = ()
    """For each part of the batch: begin and end on each pipeline stage, seconds of CLOCK_MONOTONIC of the stage's
    host. Empty: not measured. Of a batch that goes on with an interrupted chunk: only its own."""
    interrupted: bool = False
    """Whether an `interruptible` batch was stopped between layers: it emits nothing, and `elapsed_s` is so far."""


class Executor(Protocol):
    """Carries out batches in the order in which they are submitted."""

    interrupts: Callable[[], bool] | None
    """Asked between the layers of an `interruptible` batch whether to stop it, set by the engine's loop. None: such
    batches are carried out like others, as by executors whose batches are computed in other processes."""

    @property
    def waits_on(self) -> tuple[Any, ...]:
        """What a `zmq.Poller` may wait on while batches are in flight: `result` may then have something. Empty for an
        executor that computes in `submit`."""

    @property
    def accepts(self) -> bool:
        """Whether the next batch would begin at once (stage 0 is free).

        An earlier one could not include new requests."""

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
        """Register a request before its first batch: prompt (int32, little-endian, validated) and sampling settings.

        `output`: tokens that it has generated elsewhere; batches count them as known. `kept`: KV stored here under its
        id becomes its own."""

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
