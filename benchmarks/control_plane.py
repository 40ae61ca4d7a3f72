"""What an engine tells its ranks, by context length: changes only, or tables and prompts again and again.

    python -m benchmarks.control_plane --json out/control_plane.json

Stands for Mnemosyne §5 and Fig. 13, which attributes part of its lower decode latency to sequence state that is
replicated: schedulers before it send block tables and tokens with every step. The two are switched apart here:

    deltas           Headway: one plan a step, tables replayed by the rank, the prompt sent once
    + tables         beside the plan, the request's whole block table
    + prompt         beside the plan, all of the request's tokens
    + both           what Mnemosyne replaces

A step is timed from before the plan is written until the rank, a process of its own behind ZeroMQ, has answered that it
has read it all: nothing is computed. Tables and tokens travel as raw int32, without pickling, so what they cost here is
the least that they can cost. One request; a decode, and a prefill chunk of 512, at each context. Medians.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq

from headway.core.batch import Chunk, DecodeGroup, GroupBatch, KvOp
from headway.kv.block_allocator import BlockTables
from headway.runtime.executor.messages import BatchPlan, PlanDone
from headway.runtime.executor.plan_stream import PlanReader, PlanWriter
from headway.serving.load.machine import machine

VARIANTS = {
    "deltas": (False, False),
    "+ tables": (True, False),
    "+ prompt": (False, True),
    "+ both": (True, True),
}
KINDS = ("decode", "prefill")
CHUNK = 512
SPARE = 1 << 14
"""Tokens of room beyond the context, for what is generated."""
NAME = "request"

_encoder = msgspec.msgpack.Encoder()


@dataclass(frozen=True)
class Row:
    """One variant at one context: a step's bytes to each rank (mean) and seconds (median)."""

    kind: str
    variant: str
    context: int
    bytes_a_step: float
    seconds_a_step: float


class Engine:
    """The engine's end of one request's stream, at `context` tokens, that may come to `more`."""

    def __init__(self, context: int, block: int, tables: bool, prompt: bool, more: int = 0) -> None:
        self._block = block
        self._sends_tables, self._sends_prompt = tables, prompt
        room = context + more + SPARE
        self._writer = PlanWriter({NAME: 1})
        self._table = np.arange(room // block, dtype=np.int32)
        self._tokens = np.arange(room, dtype=np.int32)
        self._held = 0
        self.known = context

    def first(self) -> list[bytes]:
        """Reserve what the context takes."""
        return self._frames(GroupBatch(0, DecodeGroup(), (), self._grown(self.known)))

    def step(self, kind: str) -> list[bytes]:
        """The frames of one iteration."""
        rows = 1 if kind == "decode" else CHUNK
        ops = self._grown(self.known + rows)
        if kind == "decode":
            group = DecodeGroup((NAME,), self.known, 1, 0, (NAME,))
            part = GroupBatch(0, group, (), ops)
        else:
            part = GroupBatch(0, DecodeGroup(), (Chunk(NAME, self.known, CHUNK, False),), ops)
        self.known += rows
        return self._frames(part)

    def _grown(self, tokens: int) -> tuple[KvOp, ...]:
        blocks = -(-tokens // self._block) - self._held
        self._held += blocks
        verb = "reserve" if self._held == blocks else "grow"
        return (KvOp(verb, NAME, blocks),) if blocks else ()  # type: ignore[arg-type]

    def _frames(self, part: GroupBatch) -> list[bytes]:
        frames = [_encoder.encode(self._writer.write(part))]
        if self._sends_tables:
            frames.append(self._table[: self._held].tobytes())
        if self._sends_prompt:
            frames.append(self._tokens[: self.known].tobytes())
        return frames


def rank(endpoint: str, blocks: int) -> None:
    """A rank that reads plans as the product's ranks do, keeps what comes beside them, and answers."""
    socket = zmq.Context().socket(zmq.DEALER)
    socket.connect(endpoint)
    decoder = msgspec.msgpack.Decoder(BatchPlan)
    tables, state = BlockTables(blocks), PlanReader()
    kept: dict[int, np.ndarray[Any, Any]] = {}
    socket.send(b"")
    while True:
        frames = socket.recv_multipart(copy=False)
        if len(frames[0].buffer) == 0:
            return
        plan = decoder.decode(frames[0].buffer)
        if plan.seq == 1:
            tables, state = BlockTables(blocks), PlanReader()
        part = state.part_of(plan)
        for op in part.kv_ops:
            tables.apply(op)
        for index, frame in enumerate(frames[1:]):
            came = np.frombuffer(frame.buffer, dtype=np.int32)
            if index not in kept or kept[index].size < came.size:
                kept[index] = np.empty(2 * came.size, dtype=np.int32)
            kept[index][: came.size] = came
        socket.send(_encoder.encode(PlanDone(plan.seq, 0.0, 0.0)))


def measure(socket: zmq.Socket[bytes], name: bytes, kind: str, variant: str, context: int, block: int, n: int) -> Row:
    """`n` steps: decodes one after another, chunks each at this context."""
    sizes, times = [], []
    for i in range(n):
        if not i or kind == "prefill":
            engine = Engine(context, block, *VARIANTS[variant])
            socket.send_multipart([name, *engine.first()], copy=False)
            socket.recv_multipart()
        begun = time.perf_counter()
        frames = engine.step(kind)
        socket.send_multipart([name, *frames], copy=False)
        socket.recv_multipart()
        times.append(time.perf_counter() - begun)
        sizes.append(sum(map(len, frames)))
    return Row(kind, variant, context, statistics.mean(sizes), statistics.median(times))


def whole_prefill(context: int, block: int, variant: str) -> int:
    """Bytes to one rank while a prompt of that length is prefilled in chunks; it comes once, or with every step."""
    tables, prompt = VARIANTS[variant]
    engine = Engine(0, block, tables, False, context)
    steps = -(-context // CHUNK)
    told = sum(len(frame) for _ in range(steps) for frame in engine.step("prefill"))
    return told + 4 * context * (steps if prompt else 1)


def run(contexts: list[int], block: int, steps: int, rounds: int) -> list[Row]:
    """Every variant at every context, in turn, `rounds` times; the median of the rounds."""
    most = max(contexts)
    with tempfile.TemporaryDirectory() as folder:
        endpoint = f"ipc://{folder}/ranks"
        socket = zmq.Context.instance().socket(zmq.ROUTER)
        socket.bind(endpoint)
        blocks = (most + SPARE) // block
        process = multiprocessing.get_context("spawn").Process(target=rank, args=(endpoint, blocks), daemon=True)
        process.start()
        name = socket.recv_multipart()[0]
        measure(socket, name, "decode", "+ both", most, block, 50)  # warm
        seen: dict[tuple[str, str, int], list[Row]] = {}
        for kind, context, variant in [*_all(contexts)] * rounds:
            row = measure(socket, name, kind, variant, context, block, steps)
            seen.setdefault((kind, variant, context), []).append(row)
        socket.send_multipart([name, b""])
        process.join()
        socket.close()
    return [
        Row(*key, rows[0].bytes_a_step, statistics.median(row.seconds_a_step for row in rows))
        for key, rows in seen.items()
    ]


def _all(contexts: list[int]) -> Iterator[tuple[str, int, str]]:
    return ((kind, context, variant) for kind in KINDS for context in contexts for variant in VARIANTS)


def table(title: str, contexts: list[int], cells: dict[tuple[str, int], str]) -> None:
    print(f"\n{title}\n{'context':>10}" + "".join(f"{variant:>14}" for variant in VARIANTS))
    for context in contexts:
        print(f"{context:>10,}" + "".join(f"{cells[variant, context]:>14}" for variant in VARIANTS))


def main() -> int:
    parser = argparse.ArgumentParser(description="Bytes and time of the control plane, by context length.")
    parser.add_argument("--contexts", type=int, nargs="*", default=[1 << n for n in range(10, 21, 2)])
    parser.add_argument("--block-tokens", type=int, default=16, help="tokens a block, as paged engines have (16)")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    a = parser.parse_args()
    rows = run(a.contexts, a.block_tokens, a.steps, a.rounds)
    found = {(row.kind, row.variant, row.context): row for row in rows}
    whole = {(v, c): whole_prefill(c, a.block_tokens, v) for v in VARIANTS for c in a.contexts}
    print(f"{machine()['cpu']}, {machine()['cores']} cores; blocks of {a.block_tokens} tokens, one rank")
    for kind in KINDS:
        cells = {(v, c): f"{found[kind, v, c].bytes_a_step:,.0f}" for v in VARIANTS for c in a.contexts}
        table(f"{kind}: bytes a step and rank", a.contexts, cells)
        cells = {(v, c): f"{found[kind, v, c].seconds_a_step * 1e6:,.0f}" for v in VARIANTS for c in a.contexts}
        table(f"{kind}: microseconds a step", a.contexts, cells)
    cells = {key: f"{size:,}" for key, size in whole.items()}
    table(f"the whole prompt in chunks of {CHUNK}: bytes a rank, the prompt itself included", a.contexts, cells)
    if a.json:
        report = {
            "schema": "headway.control-plane/1",
            "machine": machine(),
            "block_tokens": a.block_tokens,
            "chunk": CHUNK,
            "steps": [asdict(row) for row in rows],
            "whole_prefill_bytes": [{"variant": v, "context": c, "bytes": size} for (v, c), size in whole.items()],
        }
        a.json.parent.mkdir(parents=True, exist_ok=True)
        a.json.write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
