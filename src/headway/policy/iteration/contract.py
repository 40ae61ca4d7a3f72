"""Protocols of an instance's scheduler, of one KV group or several, and of the groups towards each other.

An engine or a simulator calls `add` and `abort` as requests come and go, `schedule` whenever a first pipeline stage is
free, and `complete` when a batch has been carried out. Deterministic: the same calls with the same times give the same
batches. Implemented by `scheduler.Scheduler` (one group) and `grouped_scheduler.GroupedScheduler` (several).
"""

from __future__ import annotations

from collections.abc import Container
from collections.abc import Sequence as Seq
from typing import Protocol

from headway.core.batch import Batch, RequestProgress
from headway.core.request import Phase, Request, RequestEvent, Span
from headway.kv.block_manager import BlockManager
from headway.kv.staged_kv import StagedKv
from headway.perf.latency.base import LatencyModel
from headway.policy.iteration.config import SchedulerConfig


class InstanceScheduler(Protocol):
    """Scheduler of one instance: add → schedule → complete. It never waits, reads a clock, or sees a token."""

    @property
    def config(self) -> SchedulerConfig: ...

    @property
    def latency(self) -> LatencyModel: ...

    @property
    def block_managers(self) -> Seq[BlockManager]:
        """The block manager of each group, in order of the groups."""

    @property
    def running(self) -> int:
        """Requests that hold KV."""

    @property
    def waiting(self) -> int:
        """Requests that hold none yet."""

    @property
    def idle(self) -> bool: ...

    def __contains__(self, request_id: str) -> bool: ...

    def deadline_s(self, request_id: str) -> float:
        """Return when the first token of a request is due, seconds: by its SLO, else by the configured default."""

    def predicted_ttft_s(self, request: Request, now: float) -> float:
        """Return when a new request would have its first token, seconds after its arrival, if nothing came after it."""

    def progress(self, request_id: str) -> int:
        """Return how many tokens of a request have their KV in place; for one that decodes, a lower bound."""

    @property
    def staged_kv(self) -> StagedKv | None:
        """Staged KV, which no scheduled request owns; None: this instance stages none."""

    def add(self, span: Span, now: float, phase: Phase = "all") -> None:
        """Queue a request. Raises RequestError when it could never be served here, or its id is in use.

        KV staged under its id becomes its own: it must hold the `cached_tokens`, and have blocks for the whole prompt
        if more than the last token is left to compute. phase "prefill": the request ends with its first token
        (`staged`) and its KV is staged, unless that token is reported as its end. "decode": the KV of all tokens but
        the last must be staged."""

    def schedule(self, now: float, ahead: int = 1, free: Container[int] | None = None) -> Batch | None:
        """Return the next batch, or None: nothing to compute, or `stages` batches in flight in every group.

        `ahead` above 1 allows a batch of decodes that stands for up to so many iterations (`Batch.repeat`). `free`: the
        groups whose first stage can begin at once; None: all. Call it until it returns None: groups that share no
        request have batches of their own."""

    def complete(
        self, batch_id: int, results: Seq[RequestProgress], now: float, elapsed_s: float | None = None, repeats: int = 1
    ) -> list[RequestEvent]:
        """Apply a batch that has been carried out. Return the events since the last call, preemptions while scheduling
        included.

        `results` must contain the requests that have ended; any other request that yielded output (a decode of the
        batch, a prompt whose last chunk was in it) has accepted one token and goes on. `elapsed_s`: measured seconds,
        for latency models that learn. `repeats`: iterations carried out, at most the batch's `repeat`."""

    def abort(self, request_id: str, now: float) -> list[RequestEvent]:
        """Drop a request: at once, or when the batch that it is in completes. Unknown ids (ended) are ignored."""

    def stage(self, request_id: str, now: float) -> list[RequestEvent]:
        """End a request that will decode on another instance, and stage its KV: at once, or when its batch completes.

        Unknown ids (ended) are ignored, as is every call if `staged_kv` is None."""

    def lost(self, instance: int, now: float) -> list[RequestEvent]:
        """Reset after the instance has lost its KV, in all groups: batches in flight are void, all progress is redone.

        The next batches' KV operations start from empty block tables. Return events as `complete` does."""

    def check(self) -> None:
        """Raise InvariantError unless cursors, sets and block managers agree.

        Called when idle and by tests each step."""
