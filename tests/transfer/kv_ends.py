"""Connectors in one process: peers over Unix sockets, shared memory and NIXL, pools of plain bytes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from headway.kv.allocator import slots_of
from headway.runtime.engine.protocol import KvArrived, PeerAddress, SpanTaskLost
from headway.runtime.kv_transfer.connector import (
    Bytes,
    KvPart,
    KvPlace,
    SaveKv,
    make_connector,
)
from headway.runtime.kv_transfer.local import PeerConnector
from headway.runtime.kv_transfer.peers import PeerNetwork

LAYERS, SLOTS, VECTOR = 3, 96, 8
KV_HEADS = 16


class End:
    """One instance or rank: heads [first, stop) of the model, filled with bytes of its own."""

    def __init__(
        self,
        number: int,
        folder: Path,
        heads: range = range(2),
        connector: str = "peers",
        kv_heads: int = KV_HEADS,
        ranks: int = 1,
    ) -> None:
        """connector: `peers`, `nixl`, or `socket`: without memory that another end reads. ranks: of its instance, over
        which the model's `kv_heads` are cut."""
        self.number, self.heads = number, heads
        self.peers = PeerNetwork(number, 0, f"unix:{folder / f'{number}'}")
        self.rung = threading.Event()
        if connector == "socket":
            self.connector = PeerConnector(self.peers, self.rung.set, (), kv_heads)
        else:
            self.connector = make_connector(connector, self.peers, self.rung.set, kv_heads, ranks)
        rng = np.random.default_rng(number)
        self.cache: Bytes = rng.integers(0, 255, (LAYERS, 2, len(heads), SLOTS, VECTOR), dtype=np.uint8)
        self.received: list[KvArrived] = []
        self.lost: list[SpanTaskLost] = []

    def open(self, request: str, tokens: int, runs: tuple[tuple[int, int], ...]) -> None:
        self.connector.update_state_after_alloc(request, KvPlace(self.cache, self.heads, tokens, runs))

    def part(self, positions: np.ndarray, slots: np.ndarray, heads: range | None = None) -> KvPart:
        heads = heads or self.heads
        return KvPart(self.cache, heads, heads.start - self.heads.start, positions, slots)

    def save(self, save: SaveKv, part: KvPart) -> None:
        for layer in range(LAYERS):
            self.connector.save_kv_layer(save, layer, part)
        self.connector.finish_save(save)

    def look(self) -> None:
        for end in self.connector.get_finished():
            if isinstance(end, KvArrived):
                self.received.append(end)
            else:
                self.lost.append(end)

    def until(self, true: Callable[[], bool], within_s: float = 10.0) -> None:
        end_s = time.monotonic() + within_s
        while True:
            self.look()
            if true():
                return
            assert time.monotonic() < end_s, f"{self.received} {self.lost}"
            self.rung.wait(0.05)
            self.rung.clear()

    def held(self, runs: tuple[tuple[int, int], ...], tokens: int, heads: range) -> Bytes:
        rows = slice(heads.start - self.heads.start, heads.stop - self.heads.start)
        return self.cache[:, :, rows][:, :, :, slots_of(runs, np.arange(tokens))]

    def close(self) -> None:
        self.connector.shutdown()
        self.peers.close()


def meet(*ends: End) -> None:
    table = [PeerAddress(end.number, 0, end.peers.address) for end in ends]
    for end in ends:
        end.peers.meet(table)
