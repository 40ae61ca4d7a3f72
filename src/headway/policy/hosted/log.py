"""Event log of a hosted policy: every call of its driver with the host's answers, enough to decide again (`replay`).

The lines are those of the native engine's log (`start`, `add`, `schedule`, `batch`), with what a replay needs beside
them: free blocks and the blocks that requests would take (`free`, `needs`), the decision itself (`quotas`), what the
host has scheduled of it (`scheduled`), and `preempt`, `end` and `rebuild`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict
from typing import Any

from headway.core.logs import EventSink, arrival_fields
from headway.core.request import Request
from headway.perf.latency.base import BatchLoad, load_s
from headway.perf.latency.corrected import describe
from headway.policy.hosted.driver import PolicyDriver, ReservedKvPool, StepPlan, VllmRequest
from headway.policy.iteration.decision import IterationPolicy

_MOST_IN_FLIGHT = 64
"""Steps whose results never came are forgotten beyond so many, as by `StepClock`."""


class DriverLog:
    """The log of one host. It outlives its drivers, which are made anew after an error."""

    def __init__(self, write: EventSink, now: Callable[[], float], host: Mapping[str, object]) -> None:
        """`host`: fields of the `start` event that identify the host and its version."""
        self.write = write
        self.now = now
        self._host = host
        self._started = False
        self._steps = 0
        # Answers of the host's block pool to the driver's current call.
        self._free: int | None = None
        self._needs: dict[tuple[str, int], int] = {}
        # Requests that have ended by themselves, until the driver has that event.
        self._finished: set[str] = set()
        # Fields of the `batch` event of each step in flight, with its load.
        self._in_flight: deque[tuple[BatchLoad, dict[str, Any]]] = deque(maxlen=_MOST_IN_FLIGHT)

    def watched(
        self, free: Callable[[], int], needed: Callable[[str, int], int]
    ) -> tuple[Callable[[], int], Callable[[str, int], int]]:
        """Return the host's two questions about blocks, with their answers noted for the log."""

        def watched_free() -> int:
            self._free = free()
            return self._free

        def watched_needed(request_id: str, tokens: int) -> int:
            blocks = self._needs[request_id, tokens] = needed(request_id, tokens)
            return blocks

        return watched_free, watched_needed

    def event(self, kind: str, **fields: Any) -> None:
        """Write one event with the answers of the pool since the last one."""
        if self._free is not None:
            fields["free"] = self._free
        if self._needs:
            fields["needs"] = [(name, tokens, blocks) for (name, tokens), blocks in self._needs.items()]
        self._free, self._needs = None, {}
        self.write(kind, fields)

    def driver_made(self, policy: IterationPolicy, pool: ReservedKvPool, block_tokens: int) -> None:
        """Write `start` for the first driver and `rebuild` for each later one."""
        if self._started:
            self.write("rebuild", {"at_s": self.now()})
            return
        self._started = True
        self.write(
            "start",
            {
                **self._host,
                "config": asdict(policy.config),
                "kv_tokens": pool.total_tokens,
                "blocks": pool.n_blocks,
                "block_tokens": block_tokens,
                "latency": describe(policy.latency),
            },
        )

    def decided(self, now: float, plan: StepPlan, fields: dict[str, Any], scales: Iterable[float] | None) -> None:
        """Write the inputs of a decision, and the decision."""
        self._steps += 1
        if scales is not None:
            fields["scales"] = list(scales)
        quotas = list(plan.quotas.items())
        self.event("schedule", id=self._steps, at_s=now, **fields, quotas=quotas, predicted_s=plan.predicted_s)

    def scheduled(
        self, load: BatchLoad, predicted_s: float, chunks: list[tuple[str, int, int, bool]], others: dict[str, Any]
    ) -> None:
        """Write what the host has scheduled in the step that was decided last. `others`: of all other requests."""
        self.event("scheduled", id=self._steps, chunks=chunks, **others)
        batch = {"id": self._steps, "predicted_s": predicted_s, "decodes": load.decodes, "kv_sum": load.decode_kv}
        self._in_flight.append((load, {**batch, "chunks": [chunk[:3] for chunk in chunks]}))

    def finished(self, names: Iterable[str]) -> None:
        """Note requests that ended with the step whose measured time comes next."""
        self._finished.update(names)

    def returned(self, load: BatchLoad, elapsed_s: float) -> None:
        """Write the `batch` event of a step whose results are there."""
        # By identity: equal loads are usual.
        place = next((i for i, (own, _) in enumerate(self._in_flight) if own is load), None)
        if place is None:
            return
        fields = self._in_flight[place][1]
        del self._in_flight[place]
        now, ended = self.now(), sorted(self._finished)
        part = (0, fields["decodes"], fields["chunks"], [(now - elapsed_s, now)])
        self.write("batch", {**fields, "at_s": now, "elapsed_s": elapsed_s, "ended": ended, "parts": [part]})

    def ended(self, request_id: str) -> None:
        """Write that the driver has dropped a request."""
        aborted = {} if request_id in self._finished else {"aborted": True}
        self._finished.discard(request_id)
        self.event("end", request=request_id, at_s=self.now(), **aborted)


class RecordingDriver(PolicyDriver):
    """A driver that logs its calls and its decisions."""

    def __init__(self, policy: IterationPolicy, pool: ReservedKvPool, log: DriverLog, block_tokens: int) -> None:
        super().__init__(policy, pool)
        self._log = log
        log.driver_made(policy, pool, block_tokens)

    def enter(self, facts: Request, request: VllmRequest, running: bool = False) -> None:
        super().enter(facts, request, running)
        self._log.event(
            "add",
            **arrival_fields(facts, self._log.now()),
            cached=facts.cached_tokens,
            **({"running": True} if running else {}),
        )

    def lost(self, request: VllmRequest) -> None:
        known = request.request_id in self
        super().lost(request)
        if known:
            self._log.event("preempt", request=request.request_id, at_s=self._log.now(), tokens=request.num_tokens)

    def ended(self, request_id: str) -> None:
        known = request_id in self
        super().ended(request_id)
        if known:
            self._log.ended(request_id)

    def plan(
        self, decodes: int, rows: int, kv_sum: int, now: float, admits_new: bool, barred: Collection[str] = ()
    ) -> StepPlan:
        scales = getattr(self.policy.latency, "scales", None)
        before = None if scales is None else [float(scale) for scale in scales]
        plan = super().plan(decodes, rows, kv_sum, now, admits_new, barred)
        step: dict[str, Any] = {"decodes": decodes, "rows": rows, "kv_sum": kv_sum, "admits_new": admits_new}
        if barred:
            step["barred"] = sorted(barred)
        self._log.decided(now, plan, step, before)
        return plan

    def scheduled(self, plan: StepPlan, tokens: Mapping[str, int]) -> BatchLoad:
        prefills = {name: self.prefills[name] for name in tokens.keys() & self.prefills.keys()}
        load = super().scheduled(plan, tokens)
        chunks = [
            (name, request.num_computed_tokens - tokens[name], tokens[name], not request.is_prefill_chunk)
            for name, request in sorted(prefills.items())
        ]
        others: dict[str, Any] = {
            "others": len(tokens) - len(chunks),
            "rows": sum(tokens.values()) - sum(chunk[2] for chunk in chunks),
        }
        if left_out := sorted(self.decoding.keys() - tokens.keys()):
            others["left_out"] = left_out
        self._log.scheduled(load, load_s(self.policy.latency, load), chunks, others)
        return load

    def observed(self, load: BatchLoad, seconds: float) -> None:
        self._log.returned(load, seconds)
        super().observed(load, seconds)
