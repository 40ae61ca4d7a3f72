"""Instances whose ranks are threads of this process, of any number; KV moves between them over real sockets."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tests.helpers.rank_serving import make_core
from tests.helpers.virtual_ranks import VirtualWorld

from headway.core.batch import ManualClock
from headway.core.request import Phase, SamplingParams
from headway.perf.latency.layout import ParallelLayout
from headway.runtime.cluster.agent import InstanceAgent, KvConnectorScheduler
from headway.runtime.engine.protocol import (
    AbortRequest,
    FromInstance,
    KvArrived,
    MeetPeers,
    OutputDelta,
    PeerAddress,
    ReserveKv,
    SendKv,
    SubmitRequest,
)
from headway.runtime.executor.plans import RankPeer
from headway.runtime.kv_transfer.multi_rank import MultiRankKvTransfer, MultiRankPeers

BLOCKS, BLOCK = 64, 8


class VirtualInstance:
    def __init__(self, number: int, model: Path, sockets: Path, tp: int, **scheduler: Any) -> None:
        self.number = number
        peer = RankPeer(number=number, incarnation=0, listen=f"unix:{sockets}/p{number}", secret="", connector="peers")
        self.world = VirtualWorld(model, ParallelLayout(tp=tp), BLOCKS, BLOCK, peer=peer)
        self.executor = self.world.executor
        self.core = make_core(self.executor, BLOCKS, BLOCK, **scheduler)
        port = MultiRankKvTransfer(self.executor, self.core.scheduler.block_managers[0].drain_ops)
        desk = KvConnectorScheduler(self.core, port, self.executor.replay, ManualClock())
        self.member = InstanceAgent(self.core, port.computes, MultiRankPeers(number, port), ManualClock(), 5.0, desk)
        self.words: list[FromInstance] = []
        self.deltas: dict[str, list[OutputDelta]] = {}
        self.world.__enter__()

    @property
    def peer(self) -> PeerAddress:
        first, *others = self.executor.peer_addresses
        return PeerAddress(self.number, 0, first, tuple(others))

    def send(self, message: FromInstance, measured: bool = False) -> None:
        self.words.append(message)

    def turn(self) -> None:
        for delta in self.core.step(0.0):
            self.deltas.setdefault(delta.id, []).append(delta)
        self.words += self.core.staged
        self.core.staged.clear()
        self.member.turn(self)  # type: ignore[arg-type]

    def submit(self, name: str, prompt: Sequence[int], most: int, phase: Phase, output: tuple[int, ...] = ()) -> None:
        params = SamplingParams(max_tokens=most, temperature=0.0, ignore_eos=True)
        message = SubmitRequest(
            id=name, prompt_tokens=len(prompt), params=params, received_s=0.0, phase=phase, output=output
        )  # fmt: skip
        self.member.submitted(message)
        refused = self.core.submit(message, frame_of(prompt))
        assert refused is None, refused

    def tokens(self, name: str) -> list[int]:
        return [token for delta in self.deltas.get(name, ()) for token in delta.tokens]

    def close(self) -> None:
        self.world.__exit__()


def frame_of(prompt: Sequence[int]) -> memoryview:
    return memoryview(np.array(prompt, dtype=np.int32).tobytes())


class Pair:
    """A source and a target, which have met; `until` drives both."""

    def __init__(self, source: VirtualInstance, target: VirtualInstance) -> None:
        self.source, self.target = source, target
        for one in (source, target):
            one.member.take(MeetPeers((source.peer, target.peer)), None)

    def until(self, true: Callable[[], object]) -> None:
        end_s = time.monotonic() + 20.0
        while not true():
            assert time.monotonic() < end_s, (self.source.words, self.target.words, self.target.deltas)
            for one in (self.source, self.target):
                one.turn()
            time.sleep(0.0005)

    def hear(self, on: VirtualInstance, kind: type, name: str) -> None:
        self.until(lambda: any(isinstance(word, kind) and word.id == name for word in on.words))

    def reserve(self, name: str, prompt: Sequence[int]) -> None:
        admit = SubmitRequest(id=name, prompt_tokens=len(prompt), params=SamplingParams(max_tokens=1), phase="spans")
        self.target.member.take(admit, frame_of(prompt))
        self.target.member.take(ReserveKv(name, len(prompt)), None)
        self.hear(self.target, ReserveKv, name)

    def send(self, name: str, edges: Sequence[tuple[int, int]]) -> None:
        for piece, (start, end) in enumerate(edges):
            message = SendKv(id=name, piece=piece, start=start, end=end, to=self.target.number)
            self.source.member.take(message, None)

    def arrived(self, name: str, pieces: Iterable[int]) -> None:
        wanted = sorted(pieces)
        self.until(
            lambda: sorted(w.piece for w in self.target.words if isinstance(w, KvArrived) and w.id == name) == wanted
        )

    def hand_over(self, name: str, prompt: Sequence[int], most: int, edges: Sequence[tuple[int, int]]) -> list[int]:
        """Prefill here, decode there; the KV goes in pieces, asked for before it is computed. All tokens."""
        self.reserve(name, prompt)
        self.source.submit(name, prompt, most, "prefill")
        self.send(name, edges)
        self.hear(self.source, OutputDelta, name)
        self.arrived(name, range(len(edges)))
        first = tuple(self.source.tokens(name))
        self.target.submit(name, prompt, most, "decode", first)
        self.source.member.take(AbortRequest(name), None)
        self.until(lambda: self.target.deltas.get(name) and self.target.deltas[name][-1].finish)
        return [*first, *self.target.tokens(name)]

    def empty(self) -> None:
        """Nothing is left anywhere."""
        self.until(lambda: all(one.core.idle for one in (self.source, self.target)))
        for one in (self.source, self.target):
            one.core.scheduler.check()
            assert one.core.stats().kv_tokens_used == 0

    def close(self) -> None:
        for one in (self.source, self.target):
            one.close()
