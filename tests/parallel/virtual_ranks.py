"""Ranks as threads of one process: a double of processes, sockets and collectives, for layouts of any size.

Everything else is the product's own: executor, plan stream, rank loop, worker. Sums add in rank order, so runs repeat.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headway.perf.hardware import ParallelLayout
from headway.runtime.engine.protocol import EndProcess
from headway.runtime.executor.multi_process import MultiProcessExecutor
from headway.runtime.executor.plans import Frame, FromRank, RankPosition, places
from headway.runtime.executor.rank import RankLoop, _encoder, failure
from headway.runtime.executor.worker import GroupAttention, ModelWorker
from headway.runtime.model.loading import load_decoder

WAIT_S = 60.0


class Exchange:
    """What virtual links share: one meeting point a stage, one queue a pair of ranks and kind."""

    def __init__(self, layout: ParallelLayout) -> None:
        self._meetings = {(p.group, p.stage): threading.Barrier(layout.tp) for p in places(layout)}
        self._tables: dict[tuple[int, int], list[Tensor | None]] = {key: [None] * layout.tp for key in self._meetings}
        self._queues: dict[tuple[int, int, str], queue.Queue[Any]] = {}
        self._lock = threading.Lock()

    def hold_rows(self, source: int, target: int, batches: int, wait_s: float) -> None:
        """Let a stage begin a batch only when the stage before it has sent the next one too."""
        self._queues[source, target, "rows"] = NextFirst(batches, wait_s)

    def box(self, source: int, target: int, kind: str) -> queue.Queue[Any]:
        with self._lock:
            return self._queues.setdefault((source, target, kind), queue.Queue())

    def all(self, place: RankPosition, x: Tensor) -> list[Tensor]:
        """Everybody's tensor, in rank order, as copies."""
        key = (place.group, place.stage)
        table, meeting = self._tables[key], self._meetings[key]
        table[place.tp] = x.clone()
        meeting.wait(WAIT_S)
        told = [one for one in table if one is not None]
        meeting.wait(WAIT_S)
        return told

    def abort(self) -> None:
        for meeting in self._meetings.values():
            meeting.abort()


class NextFirst(queue.Queue[Any]):
    """A queue of a known number of items that gives one only when the next one is there too (but for the last)."""

    def __init__(self, items: int, wait_s: float) -> None:
        super().__init__()
        self._left, self._wait_s = items, wait_s

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        with self.not_empty:
            there = self.not_empty.wait_for(lambda: len(self.queue) >= min(2, self._left), self._wait_s)
            assert there, f"the next of {self._left} items does not come before this one is taken"
            self._left -= 1
            return self._get()


class VirtualLinks:
    """`Links` of one virtual rank."""

    def __init__(self, place: RankPosition, exchange: Exchange) -> None:
        self._place, self._exchange = place, exchange

    def sum_(self, x: Tensor) -> Tensor:
        parts = self._exchange.all(self._place, x)
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return x.copy_(total)

    def gather(self, x: Tensor, widths: list[int]) -> Tensor | None:
        parts = self._exchange.all(self._place, x)
        assert [part.shape[1] for part in parts] == widths
        return None if self._place.tp else torch.cat(parts, dim=1)

    def expect_rows(self, rows: int) -> Callable[[], Tensor]:
        box = self._exchange.box(self._place.at_stage(self._place.stage - 1).rank, self._place.rank, "rows")

        def wait() -> Tensor:
            hidden: Tensor = box.get(timeout=WAIT_S)
            assert hidden.shape[0] == rows
            return hidden

        return wait

    def send_rows(self, hidden: Tensor) -> None:
        behind = self._place.at_stage(self._place.stage + 1).rank
        self._exchange.box(self._place.rank, behind, "rows").put(hidden.clone())

    def expect_tokens(self, count: int) -> Callable[[], list[int]]:
        box = self._exchange.box(self._place.drawer.rank, self._place.rank, "tokens")

        def wait() -> list[int]:
            tokens: list[int] = box.get(timeout=WAIT_S)
            assert len(tokens) == count
            return tokens

        return wait

    def send_tokens(self, tokens: list[int]) -> None:
        for reader in self._place.readers:
            self._exchange.box(self._place.rank, reader.rank, "tokens").put(list(tokens))

    def expect_from(self, group: int, shape: tuple[int, ...], dtype: torch.dtype) -> Callable[[], Tensor]:
        box = self._exchange.box(self._place.in_group(group).rank, self._place.rank, "peers")

        def wait() -> Tensor:
            x: Tensor = box.get(timeout=WAIT_S)
            assert (x.shape, x.dtype) == (shape, dtype)
            return x

        return wait

    def send_to(self, group: int, x: Tensor) -> None:
        assert x.is_contiguous()
        self._exchange.box(self._place.rank, self._place.in_group(group).rank, "peers").put(x.clone())

    def close(self) -> None:
        pass


class VirtualChannel:
    """A rank's end of the virtual wire."""

    def __init__(self, rank: int, wire: VirtualWire) -> None:
        self._rank, self._wire = rank, wire

    def receive(self, wait: bool) -> list[memoryview] | None:
        try:
            frames = self._wire.boxes[self._rank].get(block=wait, timeout=WAIT_S if wait else None)
        except queue.Empty:
            return None
        return [memoryview(frame) for frame in frames]

    def send(self, frame: bytes) -> None:
        self._wire.inbox.put((self._rank, [frame]))


class VirtualWire:
    """`Wire` to threads. `tamper(rank, frames)` may change, drop (None) or pass on what the engine sends."""

    waits_on: tuple[Any, ...] = ("queue",)

    def __init__(self, ranks: int) -> None:
        self.boxes: list[queue.Queue[Any]] = [queue.Queue() for _ in range(ranks)]
        self.inbox: queue.Queue[tuple[int, list[bytes]]] = queue.Queue()
        self.tamper: Callable[[int, Sequence[Frame]], Sequence[Frame] | None] = lambda rank, frames: frames
        self.sent_bytes = 0
        self.on_close: Callable[[], None] = lambda: None

    def send(self, rank: int, frames: Sequence[Frame]) -> None:
        passed = self.tamper(rank, frames)
        if passed is not None:
            self.boxes[rank].put([bytes(frame) for frame in passed])

    def receive(self, timeout_s: float | None) -> tuple[int, list[bytes]] | None:
        try:
            return self.inbox.get(block=timeout_s != 0, timeout=WAIT_S if timeout_s is None else timeout_s or None)
        except queue.Empty:
            if timeout_s is None:
                raise
            return None

    def starved(self, rank: int, limit_s: float, now: float) -> bool:
        return False

    def close(self) -> None:
        for box in self.boxes:
            box.put([_encoder.encode(EndProcess())])
        self.on_close()

    kill = close


class VirtualWorld:
    """All ranks of a layout over one checkpoint, and the executor over them. A context manager."""

    def __init__(
        self, folder: Path, layout: ParallelLayout, kv_blocks: int = 64, block_tokens: int = 8, dtype: str = "float32"
    ) -> None:
        self.wire = VirtualWire(layout.accelerators)
        exchange = Exchange(layout)
        self.workers: list[ModelWorker] = []
        for place in places(layout):
            links = VirtualLinks(place, exchange)
            group = links if layout.tp > 1 else None
            decoder = load_decoder(folder, dtype, shard=place.shard, group=group)
            if layout.kvp > 1:
                decoder.backend = GroupAttention(decoder.backend, links, decoder.config.q_heads)
            self.workers.append(ModelWorker(decoder, kv_blocks, block_tokens, (), links))
        self.exchange = exchange
        self.threads = [threading.Thread(target=self._serve, args=(p,), daemon=True) for p in places(layout)]
        self.wire.on_close = self._join
        self.executor = MultiProcessExecutor(self.wire, layout)

    def _serve(self, place: RankPosition) -> None:
        try:
            RankLoop(self.workers[place.rank], VirtualChannel(place.rank, self.wire)).serve()
        except BaseException as error:
            self.exchange.abort()
            said: FromRank = failure(error)
            self.wire.inbox.put((place.rank, [_encoder.encode(said)]))

    def _join(self) -> None:
        for thread in self.threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()

    def __enter__(self) -> VirtualWorld:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.executor.close()
