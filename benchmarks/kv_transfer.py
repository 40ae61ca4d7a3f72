"""How fast KV gets from one process's pool to another's: through shared memory and through a Unix socket, beside what
the memory allows.

Run: python benchmarks/kv_transfer.py [--mib 256] [--repeats 7] [--vector 256] [--heads 8] [--slab-kib 2048]
[--slabs 8] [--ways shared socket nixl]. Two processes with the connector `peers` (way `nixl`: with that one; `socket`:
without shared memory), pools of `--heads` KV heads of `--vector` bytes; no model and no router, nothing is computed
meanwhile. The ways take turns in one run, for tokens in one run of slots, in blocks of 16 that lie anywhere, and every
second one (a stripe of two).

Rate: from the first `save_kv_layer` to the last byte in its slot. CPU: of both processes, all threads. `memory`: what
two processes copy at once, each its own bytes, one from a pool into 8 MiB and the other from 8 MiB into a pool, in
pieces of a slab: no way with two copies of each byte is faster. And in pieces as they lie in a pool that has each
head's tokens together, as ours do. Medians.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import statistics
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from headway.kv.slot_ranges import Indices
from headway.runtime.kv_transfer import slab_memory
from headway.runtime.kv_transfer.connector import KvPart, KvPlace, SaveKv
from headway.runtime.kv_transfer.peer_connector import PeerConnector
from headway.runtime.kv_transfer.peers import PeerAddress, PeerNetwork
from headway.runtime.kv_transfer.slab_memory import MemoryKind, SharedMemory

LAYERS = 8
WAYS = ("shared", "socket", "nixl")
LAYOUTS = ("run", "blocks", "stripes")
_RING = 8 << 20


def tokens_of(options: argparse.Namespace) -> int:
    return (options.mib << 20) // (LAYERS * 2 * options.heads * options.vector) // 32 * 32


def layouts(tokens: int, seed: int) -> dict[str, tuple[Indices, Indices, tuple[tuple[int, int], ...]]]:
    """Positions, slots from which they are sent, runs of slots into which."""
    everyone = np.arange(tokens, dtype=np.int64)
    order = np.random.default_rng(seed).permutation(2 * tokens // 16)
    blocks = (16 * order[: tokens // 16, None] + np.arange(16)).reshape(-1)
    scattered = tuple((16 * int(block), 16) for block in order[tokens // 16 :])
    return {
        "run": (everyone, everyone, ((tokens, tokens),)),
        "blocks": (everyone, blocks, scattered),
        "stripes": (everyone[::2], everyone[: tokens // 2], ((tokens, tokens),)),
    }


class Side:
    """One process: its pool, and an end for each way."""

    def __init__(self, number: int, folder: str, options: argparse.Namespace) -> None:
        slab_memory.SLAB_BYTES, slab_memory.SLABS = options.slab_kib << 10, options.slabs
        self.number, self.options = number, options
        shape = (LAYERS, 2, options.heads, 2 * tokens_of(options), options.vector)
        self.pool = np.full(shape, 1 + number, dtype=np.uint8)
        self.peers, self.connectors, self.rung = {}, {}, {}
        for way in options.ways:
            self.peers[way] = PeerNetwork(number, 0, f"unix:{folder}/{way}{number}")
            self.rung[way] = threading.Event()
            self.connectors[way] = PeerConnector(self.peers[way], self.rung[way].set, kinds_of(way))

    def meet(self, folder: str) -> None:
        for way, peers in self.peers.items():
            peers.meet([PeerAddress(n, 0, f"unix:{folder}/{way}{n}") for n in (0, 1)])

    def send(self, name: str, way: str, layout: str) -> tuple[float, float]:
        """When it began, and CPU seconds until all has left."""
        positions, slots, _ = layouts(tokens_of(self.options), 0)[layout]
        part = KvPart(self.pool, range(self.options.heads), 0, positions, slots)
        began_s, used_s = time.monotonic(), time.process_time()
        for layer in range(LAYERS):
            self.connectors[way].save_kv_layer(SaveKv(name, 1, 1), layer, part)
        self.connectors[way].finish_save(SaveKv(name, 1, 1))
        while self.connectors[way]._outlets[1].pending:
            time.sleep(0.002)
        return began_s, time.process_time() - used_s

    def open(self, name: str, way: str, layout: str) -> None:
        tokens, (_, _, runs) = tokens_of(self.options), layouts(tokens_of(self.options), 0)[layout]
        self.connectors[way].update_state_after_alloc(name, KvPlace(self.pool, range(self.options.heads), tokens, runs))

    def receive(self, name: str, way: str) -> tuple[float, float]:
        """When the last byte came, and CPU seconds."""
        used_s = time.process_time()
        while True:
            self.rung[way].wait()
            self.rung[way].clear()
            received, lost = self.connectors[way].get_finished()
            assert not lost, lost
            if received:
                self.connectors[way].forget(name)
                return received[0].ended_s, time.process_time() - used_s

    def copy(self, other: bool, step: int, barrier: float) -> float:
        """Bytes per second of copies by this process, `step` bytes each, while the other one copies too."""
        ring, pool = np.ones(_RING, dtype=np.uint8), self.pool.reshape(-1)[: self.options.mib << 20]
        time.sleep(max(0.0, barrier - time.monotonic()))
        began_s = time.perf_counter()
        for _ in range(3):
            for at in range(0, pool.nbytes, step):
                place = ring[at % _RING : at % _RING + step]
                source, target = (place, pool[at : at + step]) if other else (pool[at : at + step], place)
                np.copyto(target[: source.nbytes], source[: target.nbytes])
        return 3 * pool.nbytes / (time.perf_counter() - began_s)


def kinds_of(way: str) -> tuple[MemoryKind, ...]:
    if way == "nixl":
        from headway.runtime.kv_transfer.nixl_memory import NixlMemory

        return (NixlMemory(),)
    return (SharedMemory(),) if way == "shared" else ()


def serve(number: int, folder: str, options: argparse.Namespace, pipe: Connection) -> None:
    side = Side(number, folder, options)
    pipe.send(None)
    while (said := pipe.recv()) is not None:
        pipe.send(getattr(side, said[0])(*said[1:]))
    for way in options.ways:
        side.connectors[way].shutdown()
        side.peers[way].close()


def measure(pipes: list[Connection], options: argparse.Namespace) -> None:
    def ask(side: int, *said: object) -> None:
        pipes[side].send(said)

    size = LAYERS * 2 * options.heads * options.vector * tokens_of(options)
    rates: dict[tuple[str, str], list[float]] = {}
    used: dict[tuple[str, str], list[float]] = {}
    packet = options.slab_kib << 10
    limits: dict[int, list[float]] = {packet: [], packet // (2 * options.heads): []}
    for turn in range(options.repeats + 1):
        for layout in LAYOUTS:
            moved = moved_of(layout, size)
            for way in options.ways if turn % 2 else options.ways[::-1]:
                name = f"{way}{layout}{turn}"
                ask(1, "open", name, way, layout)
                pipes[1].recv()
                ask(1, "receive", name, way)
                ask(0, "send", name, way, layout)
                (began_s, sent), (ended_s, came) = (pipe.recv() for pipe in pipes)
                if turn:
                    rates.setdefault((layout, way), []).append(moved / (ended_s - began_s) / 1e9)
                    used.setdefault((layout, way), []).append((sent + came) / moved * 1e9)
        for step in limits:
            barrier = time.monotonic() + 0.05
            for side in (0, 1):
                ask(side, "copy", bool(side), step, barrier)
            limits[step].append(min(pipe.recv() for pipe in pipes) / 1e9)
    limit = statistics.median(limits[packet][1:])
    print(
        f"{cpu()}, {os.cpu_count()} cores; {size / 2**20:.0f} MiB, {LAYERS} layers, {options.heads} heads of "
        f"{options.vector} bytes, {options.slabs} slabs of {options.slab_kib} KiB, {options.repeats} repeats"
    )
    for step, found in limits.items():
        span = f"({min(found):.2f} to {max(found):.2f})"
        print(f"memory, in pieces of {step >> 10} KiB: {statistics.median(found[1:]):.2f} GB/s {span}")
    print("tokens    way      GB/s (range)           of memory       ms   CPU s/GB   to the last way: rate   CPU")
    for layout in LAYOUTS:
        base = layout, options.ways[-1]
        for way in options.ways:
            found = rates[layout, way]
            rate, cost = statistics.median(found), statistics.median(used[layout, way])
            span, ms = f"({min(found):.2f} to {max(found):.2f})", moved_of(layout, size) / rate / 1e6
            print(
                f"{layout:<10}{way:<8}{rate:>5.2f} {span:<17}{rate / limit:>9.2f}{ms:>9.2f}{cost:>11.3f}"
                f"{rate / statistics.median(rates[base]):>24.2f}{cost / statistics.median(used[base]):>6.2f}"
            )


def moved_of(layout: str, size: int) -> int:
    return size // 2 if layout == "stripes" else size


def cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(": ")[1] for line in lines if line.startswith("model name")), platform.machine())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--vector", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--slab-kib", type=int, default=slab_memory.SLAB_BYTES >> 10)
    parser.add_argument("--slabs", type=int, default=slab_memory.SLABS)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["shared", "socket"])
    options = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="hw-") as folder:
        pipes, children = [], []
        for number in (0, 1):
            near, far = spawn.Pipe()
            pipes.append(near)
            children.append(spawn.Process(target=serve, args=(number, folder, options, far), daemon=True))
            children[-1].start()
        for pipe in pipes:
            pipe.recv()
        for pipe in pipes:
            pipe.send(("meet", folder))
        for pipe in pipes:
            pipe.recv()
        measure(pipes, options)
        for pipe in pipes:
            pipe.send(None)
        for child in children:
            child.join()


if __name__ == "__main__":
    main()
