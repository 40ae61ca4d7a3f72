"""A document that is prepared while chats run: `python -m benchmarks.prepared_document [--tokens 64000]`.

Serves the embedded model. Chats come every half second: alone for a while, then while `POST /v1/contexts` computes the
document, then a question to the document is asked. Prints the chats' times to first token with and without the document
beside them, and that of the question.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from typing import Any

import httpx
import numpy as np

from headway.core.cpu_affinity import CORES
from headway.perf.hardware.processor import processor_name
from headway.serving.load.server_process import ServerProcess

CHAT_EVERY_S = 0.5
WORDS = "The lighthouse keeper writes down every ship that passes. "
QUESTION = "Which ships did pass?"


async def first_token_s(client: httpx.AsyncClient, **fields: Any) -> float:
    """Ask, and return the seconds to the first token of the answer."""
    body = {"model": "headway-embedded", "max_tokens": 16, "temperature": 0, "ignore_eos": True, "stream": True}
    began, first_s = time.perf_counter(), 0.0
    async with client.stream("POST", "/v1/chat/completions", json=body | fields) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if (
                not first_s
                and line.startswith("data:")
                and '"content":"' in line.replace('"content": "', '"content":"')
            ):
                first_s = time.perf_counter() - began
    return first_s


async def chats(client: httpx.AsyncClient, until: asyncio.Event, rng: np.random.Generator) -> list[float]:
    """Send a chat every half second until the event; return their times to first token."""
    sent: list[asyncio.Task[float]] = []
    while not until.is_set():
        text = " ".join(str(n) for n in rng.integers(0, 1000, 60))
        sent.append(asyncio.create_task(first_token_s(client, messages=[{"role": "user", "content": text}])))
        await asyncio.sleep(CHAT_EVERY_S)
    return list(await asyncio.gather(*sent))


async def beside(client: httpx.AsyncClient, rng: np.random.Generator, work: Any) -> tuple[list[float], Any]:
    """Run chats until `work` has ended; return their times, and its result."""
    done = asyncio.Event()
    sending = asyncio.create_task(chats(client, done, rng))
    result = await work
    done.set()
    return await sending, result


async def prepared(client: httpx.AsyncClient, document: str) -> dict[str, Any]:
    """Prepare a document, and wait until it is computed."""
    made = await client.post("/v1/contexts", json={"model": "headway-embedded", "messages": [system(document)]})
    made.raise_for_status()
    context: dict[str, Any] = made.json()
    began = time.perf_counter()
    while context["status"] == "pending":
        await asyncio.sleep(0.05)
        context = (await client.get(f"/v1/contexts/{context['id']}")).json()
    assert context["status"] == "ready", context
    return context | {"seconds": time.perf_counter() - began}


def system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


def line(name: str, times_s: list[float]) -> None:
    """Print a row of times."""
    p99 = float(np.percentile(times_s, 99))
    print(f"{name:>44} {statistics.median(times_s) * 1000:>8.0f} {p99 * 1000:>8.0f} ms   of {len(times_s)}")


async def measure(document: str, alone_s: float, more: list[str]) -> None:
    """Run all of it and print the rows."""
    flags = [
        "--dtype",
        "float32",
        "--kv-cache-memory",
        "1G",
        "--max-model-len",
        "128k",
        *more,
    ]
    rng = np.random.default_rng(1)
    question = {"messages": [{"role": "user", "content": QUESTION}]}
    with ServerProcess(flags) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=600) as client:
            await beside(client, rng, asyncio.sleep(5))
            alone, _ = await beside(client, rng, asyncio.sleep(alone_s))
            loaded, context = await beside(client, rng, prepared(client, document))
            again, _ = await beside(client, rng, asyncio.sleep(alone_s))
            asked_s = await first_token_s(client, **question, context_id=context["id"])
    print(f"{context['tokens']:,} tokens prepared in {context['seconds']:.1f} s beside chats")
    print(f"{'chats, time to first token':>44} {'P50':>8} {'P99':>8}")
    line("alone, before and after", [*alone, *again])
    line("while the document is prepared", loaded)
    print(f"{'first question':>44} {asked_s * 1000:>8.0f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=64_000, help="about so many of the document")
    parser.add_argument("--alone", type=float, default=20.0, metavar="S", help="seconds of chats alone, twice")
    parser.add_argument("--background-wait", metavar="MS", help="the server's --background-wait-ms")
    arguments = parser.parse_args()
    more = [] if arguments.background_wait is None else ["--background-wait-ms", arguments.background_wait]
    print(f"{processor_name()}, {len(CORES)} cores")
    document = "".join(f"{i}. {WORDS}" for i in range(max(1, arguments.tokens // 29)))
    asyncio.run(measure(document, arguments.alone, more))


if __name__ == "__main__":
    main()
