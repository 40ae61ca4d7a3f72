"""256 concurrent streams for one minute: none dropped, none mixed up, memory flat. Only in `make test-long`."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import aiohttp
import msgspec
import pytest
from tests.helpers.greedy_reference import GreedyReference, prompt_of
from tests.helpers.http_probe import model_of
from tests.helpers.process_tree import descendant_pids

from headway.serving.load.convoy import ServerProcess

STREAMS = 256
SECONDS = 60.0
SETTLED = 0.4
"""Memory is compared from this share of the run on: pools, caches and connections exist by then."""


def resident_bytes(pid: int) -> int:
    """RSS of a process and all below it."""
    total = 0
    for each in (pid, *descendant_pids(pid)):
        fields = Path(f"/proc/{each}/statm").read_text().split()
        total += int(fields[1]) * 4096
    return total


async def one_stream(session: aiohttp.ClientSession, url: str, body: bytes) -> list[int]:
    ids: list[int] = []
    done = False
    async with session.post(f"{url}/v1/completions", data=body) as answer:
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            if line.startswith(b"data: [DONE]"):
                done = True
            elif line.startswith(b"data: "):
                event = msgspec.json.decode(line[6:])
                assert "error" not in event, event
                for choice in event["choices"]:
                    ids += choice.get("token_ids") or []
    assert done, "a stream ended without [DONE]"
    return ids


async def soak(url: str, pid: int, answers: list[tuple[list[int], list[int]]]) -> tuple[int, list[tuple[float, int]]]:
    model = model_of(url)
    bodies = [
        msgspec.json.encode(
            {"model": model, "prompt": prompt, "max_tokens": len(answer), "temperature": 0, "stream": True,
             "ignore_eos": True, "return_token_ids": True}
        )
        for prompt, answer in answers
    ]  # fmt: skip
    end = time.monotonic() + SECONDS
    finished = 0
    memory: list[tuple[float, int]] = []

    async def client(number: int, session: aiohttp.ClientSession) -> None:
        nonlocal finished
        turn = number
        while time.monotonic() < end:
            which = turn % len(answers)
            assert await one_stream(session, url, bodies[which]) == answers[which][1], f"client {number}, turn {turn}"
            finished += 1
            turn += 7

    async def watch() -> None:
        while time.monotonic() < end:
            memory.append((time.monotonic(), resident_bytes(pid)))
            await asyncio.sleep(2.0)

    timeout = aiohttp.ClientTimeout(total=None, sock_read=60)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        await asyncio.gather(watch(), *(client(number, session) for number in range(STREAMS)))
    return finished, memory


@pytest.mark.long
@pytest.mark.soak
@pytest.mark.timeout(600)
def test_256_streams_for_a_minute_none_dropped_none_mixed_up_memory_flat(
    llama: Path, reference: GreedyReference
) -> None:
    shapes = [(5 + (7 * i) % 90, 8 + (11 * i) % 56) for i in range(40)] + [(900, 6), (1700, 4)]
    answers = [(prompt_of(i, n), reference.tokens(prompt_of(i, n), m)) for i, (n, m) in enumerate(shapes)]
    with ServerProcess([str(llama), "--max-num-seqs", "256", "--kv-cache-memory", "64M"]) as server:
        assert server._process is not None
        finished, memory = asyncio.run(soak(server.url, server._process.pid, answers))
    assert finished >= 10 * STREAMS
    settled = [used for at, used in memory if at >= memory[0][0] + SETTLED * SECONDS]
    first, last = settled[: len(settled) // 3], settled[-(len(settled) // 3) :]
    growth = sum(last) / len(last) - sum(first) / len(first)
    assert growth < 12 * 2**20, f"resident memory grew by {growth / 2**20:.1f} MiB: {[u >> 20 for u in settled]}"
