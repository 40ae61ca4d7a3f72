"""A wire to ranks that compute nothing and answer at once: to measure and test the control plane alone. No torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec

from headway.perf.hardware import ParallelLayout
from headway.runtime.engine.protocol import SubmitRequest
from headway.runtime.executor.plans import BatchPlan, Frame, PlanDone, PlanReader, ToRank, places

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)


class EchoTransport:
    """Every rank reads its plans as a real one does, and reports token `token` for whatever yields one.

    sent: bytes by class of message, summed over ranks.
    """

    waits_on: tuple[Any, ...] = ("echo",)

    def __init__(self, layout: ParallelLayout, token: int = 5) -> None:
        self.sent: dict[type, int] = {}
        self._token = token
        self._places = places(layout)
        self._states = [PlanReader() for _ in self._places]
        self._answers: deque[tuple[int, list[bytes]]] = deque()

    def send(self, rank: int, frames: Sequence[Frame]) -> None:
        """See `Wire.send`."""
        message = _decoder.decode(frames[0])
        kind = type(message)
        self.sent[kind] = self.sent.get(kind, 0) + sum(len(frame) for frame in frames)
        if isinstance(message, BatchPlan):
            part = self._states[rank].part_of(message)
            count = part.decodes.count + sum(chunk.last for chunk in part.prefills)
            tokens = (self._token,) * count if self._places[rank].draws else ()
            self._answers.append((rank, [_encoder.encode(PlanDone(message.seq, 0.0, 0.001, tokens))]))
        elif isinstance(message, SubmitRequest):
            assert message.prompt_tokens > 0, "a request has a prompt"

    def receive(self, timeout_s: float | None) -> tuple[int, list[bytes]] | None:
        """See `Wire.receive`."""
        return self._answers.popleft() if self._answers else None

    def close(self) -> None:
        """There is nobody to end."""
