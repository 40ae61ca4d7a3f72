"""What the journal costs a request: time to accept it, time of each token, and how both share the disk's syncs.

Run: python -m benchmarks.journal [--folder DIR] [--requests 200] [--tokens 50]. Requests of 1,000 prompt tokens, so
many at one time; DIR is on the disk to be measured (default: the temporary folder). `on the loop` is the event loop's
CPU time for a record (us), `accept` and `token` are what the request waits for it.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path

from headway.runtime.engine.protocol import OutputDelta
from headway.serving.journal import RequestJournal
from headway.serving.journal_writer import JournalWriter

PROMPT = bytes(4000)


async def measure(folder: Path, together: int, requests: int, tokens: int) -> str:
    """Return the row of a load."""
    writer = JournalWriter(RequestJournal(folder), str(folder))
    accepts: list[float] = []
    writes: list[float] = []
    turns = asyncio.Semaphore(together)

    async def one(name: int) -> None:
        async with turns:
            began = time.perf_counter()
            number = await writer.accept(f"r{name}", bytes(300), [PROMPT], "")
            accepts.append(time.perf_counter() - began)
            for token in range(tokens):
                began = time.perf_counter()
                await writer.write_output(number, 0, OutputDelta(id="x", tokens=(token,)))
                writes.append(time.perf_counter() - began)
            writer.end(number)

    cpu, began = time.thread_time(), time.perf_counter()
    await asyncio.gather(*(one(name) for name in range(requests)))
    loop_us = (time.thread_time() - cpu) / len(writes + accepts) * 1e6
    took = time.perf_counter() - began
    writer.close()
    return (
        f"{together:8} {statistics.median(accepts) * 1e3:10.2f} {statistics.median(writes) * 1e6:10.0f} "
        f"{loop_us:12.0f} {requests / took:10.0f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=50)
    given = parser.parse_args()
    print(f"{'together':>8} {'accept ms':>10} {'token us':>10} {'on the loop':>12} {'requests/s':>10}")
    for together in (1, 8, 64):
        with tempfile.TemporaryDirectory(dir=given.folder) as folder:
            print(asyncio.run(measure(Path(folder), together, given.requests, given.tokens)))


if __name__ == "__main__":
    main()
