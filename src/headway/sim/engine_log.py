"""Event log of a simulated engine, in the native engine's format (`replay`, `headway trace` and `headway why`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from headway.core.batch import Batch, RequestProgress
from headway.core.errors import ConfigError
from headway.core.event_log import EventSink, arrival_fields, batch_fields
from headway.core.request import Request
from headway.perf.latency.recorded import describe
from headway.policy.iteration.base import InstanceScheduler
from headway.sim.spec import InstanceSpec


class SimulatedEngineLog:
    """Writes the events of one engine of one stage, without repeated iterations. Times are virtual seconds."""

    def __init__(self, write: EventSink, spec: InstanceSpec, scheduler: InstanceScheduler) -> None:
        """Raises ConfigError where the log could not be replayed: several stages, or a model that is no table."""
        latency = describe(scheduler.latency)
        if spec.config.stages > 1 or latency is None:
            what = "several pipeline stages" if spec.config.stages > 1 else "a latency model that is no table"
            raise ConfigError(f"an event log of a simulation with {what} cannot be written: its replay would differ")
        self._write = write
        self._began: dict[int, float] = {}
        exchange = {"exchange": tuple(spec.exchange)} if spec.config.kv_parallel > 1 else {}
        write(
            "start",
            {
                "config": asdict(spec.config),
                "kv_tokens": spec.kv_tokens,
                "block_tokens": spec.block_tokens,
                "latency": latency,
                **exchange,
            },
        )

    def added(self, request: Request, now: float) -> None:
        """Write that a request has come."""
        self._write("add", {**arrival_fields(request, now), "cached": request.cached_tokens})

    def refused(self, request: Request, now: float, predicted_s: float) -> None:
        """Write that a request was refused, since its first token was predicted to come after so many seconds."""
        fields = {"cached": request.cached_tokens, "predicted_s": predicted_s}
        self._write("refuse", {**arrival_fields(request, now), **fields})

    def aborted(self, request_id: str, now: float) -> None:
        """Write that a request has left before its end."""
        self._write("abort", {"request": request_id, "at_s": now})

    def lost(self, now: float) -> None:
        """Write that all KV is lost."""
        self._began.clear()
        self._write("lost", {"at_s": now})

    def scheduled(self, batch: Batch, now: float, free: Sequence[int], groups: int) -> None:
        """Write that a batch has begun."""
        self._began[batch.id] = now
        some = {"free": list(free)} if len(free) < groups else {}
        self._write("schedule", {"id": batch.id, "at_s": now, **some})

    def completed(self, batch: Batch, elapsed_s: float, ended: Sequence[RequestProgress], now: float) -> None:
        """Write that a batch has ended."""
        stages = [(self._began.pop(batch.id), now)]
        self._write("batch", batch_fields(batch, elapsed_s, [stages] * len(batch.parts), ended, now))

    def interrupted(self, batch: Batch, now: float) -> None:
        """Write that an arrival has interrupted a batch."""
        del self._began[batch.id]
        self._write("interrupt", {"id": batch.id, "at_s": now})
