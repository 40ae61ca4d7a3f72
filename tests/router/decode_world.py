"""One decode on a group of instances, without processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from headway.control.entries import KvSlice
from headway.core.request import SamplingParams
from headway.runtime.cluster.decodes import GroupDecodeSteps, LiveResidency
from headway.runtime.cluster.native_backend import LiveKvMigrations
from headway.runtime.cluster.requests import AttemptTable, ClusterRequest, InstanceRegistry, RequestAttempt
from headway.runtime.engine.protocol import ComputeSpan, OutputDelta, SpanTaskDone, SubmitRequest


class RecordingInstances(InstanceRegistry):
    """Of instances with so much room, which keeps what they are told."""

    def __init__(self, *rooms: int) -> None:
        self.told: list[tuple[int, Any]] = []
        super().__init__(cast(Any, self._one(number, room)) for number, room in enumerate(rooms))

    def _one(self, number: int, room: int) -> object:
        def tell(message: Any, *frames: Any) -> None:
            self.told.append((number, message))

        return SimpleNamespace(
            number=number, tell=tell, moves_kv=True, computes_runs=True, submit=tell, abort=lambda wire: None,
            info=SimpleNamespace(kv_tokens_total=room), stats=SimpleNamespace(kv_tokens_used=0),
        )  # fmt: skip

    def take(self, kind: type) -> list[tuple[int, Any]]:
        """Messages of a kind since the last time; others are dropped."""
        told, self.told[:] = list(self.told), []
        return [(number, message) for number, message in told if isinstance(message, kind)]


class DecodeWorld:
    """One decode, of a prompt of `prompt` tokens."""

    def __init__(self, *rooms: int, in_place: bool = True, prompt: int = 100) -> None:
        self.registry, self.attempts, self.sent = RecordingInstances(*rooms), AttemptTable(), list[KvSlice]()
        self.moves = LiveKvMigrations(self.registry, self.attempts, self.sent.append)
        steps = GroupDecodeSteps(self.registry)
        self.stays = LiveResidency(self.registry, self.moves, steps, in_place, lambda a, n: None, lambda a: None)
        asked = ClusterRequest(
            SubmitRequest(id="r", prompt_tokens=prompt, params=SamplingParams(max_tokens=50), received_s=0.0), b""
        )
        self.attempt = attempt = RequestAttempt(asked, asked.try_again())
        self.attempts.add(attempt)
        controlled = SimpleNamespace(phase="decode", kv_at=set(), ended=False, backend_state=attempt, priority=0)
        attempt.controlled = cast(Any, controlled)
        attempt.asked.told.append(7)
        self.steps = steps

    def token(self) -> list[ComputeSpan]:
        """All of the group under way are done; what follows is told."""
        attempt = self.attempt
        (run,) = {message.run for _, message in self.registry.take(ComputeSpan)}
        assert set(run.group) == attempt.running
        for number in run.group:
            index = attempt.step or 0
            delta = OutputDelta(id="r", tokens=(7,)) if number == run.group[0] else None
            self.stays.computed(
                number, attempt, SpanTaskDone(id="r", index=index, began_s=0.0, ended_s=0.0, delta=delta)
            )
        return [message for _, message in self.registry.told if isinstance(message, ComputeSpan)]

    def wants(self, *group: int) -> None:
        """The policy enqueues it on a group."""
        self.stays.leave(self.attempt)
        self.stays.enter(self.attempt, group, "decode")
        self.stays.pump()
