"""The second half of `headway profile`: an engine process serves for some seconds, and says what serving costs.

Chats and a document now and then, with pauses between, through the engine's own process and messages: what a table
measured point by point leaves out (cold caches, waking up, the messages themselves) is in the scales that the engine
learns meanwhile, which are worked into the table (`latency.baked`).
"""

from __future__ import annotations

import asyncio
import random
import time

import msgspec
import numpy as np

from headway.core.sampling import SamplingParams
from headway.core.scratch import ScratchFolder
from headway.engine.client import ProcessEngineClient
from headway.engine.config import EngineConfig
from headway.engine.protocol import EngineInfo, Submit
from headway.latency import store
from headway.latency.baked import bake
from headway.latency.corrected import CorrectedLatency
from headway.latency.tables import TableSource
from headway.simulator.replay import Replayed, read_log, replay

CHATS = 3
_LEAST = 50
"""Iterations below which nothing is concluded."""


def rehearse(config: EngineConfig, source: TableSource, seconds: float, seed: int = 0) -> tuple[TableSource, int]:
    """Serve a seeded mixture for about `seconds`; the table as corrected by it, and by how many iterations. With too
    few iterations the table comes back as it is."""
    folder = ScratchFolder("headway-profile-")
    try:
        table, log = folder.path / "table.json", folder.path / "run.jsonl"
        store.save(source, table)
        asyncio.run(
            _serve(msgspec.structs.replace(config, latency_profile=str(table), event_log=str(log)), seconds, seed)
        )
        return learnt(source, replay(read_log(log)))
    finally:
        folder.close()


def learnt(source: TableSource, run: Replayed) -> tuple[TableSource, int]:
    """A table with what a run that began from that very table has learnt of it, and in how many iterations."""
    iterations = len(run.batches)
    if not isinstance(run.model, CorrectedLatency) or iterations < _LEAST:
        return source, iterations
    return bake(source, run.model.scales, f"corrected by {iterations:,} iterations of serving"), iterations


async def _serve(config: EngineConfig, seconds: float, seed: int) -> None:
    client = ProcessEngineClient(config)
    try:
        info = await client.start()
        until = time.monotonic() + seconds
        longest = max(1, min(info.max_model_len // 2, 8192))
        users = [_use(client, info, f"{seed} chat {i}", until, 32, 512) for i in range(CHATS)]
        await asyncio.gather(*users, _use(client, info, f"{seed} document", until, longest // 4, longest))
        await client.drain()
    finally:
        await client.close()


async def _use(client: ProcessEngineClient, info: EngineInfo, name: str, until: float, least: int, most: int) -> None:
    """One user: a prompt of `least` to `most` tokens, its answer, a pause about as long; until the time is over."""
    rng = random.Random(name)
    most = max(1, min(most, info.max_model_len - 64))
    least = min(least, most)
    number = 0
    while time.monotonic() < until:
        number += 1
        began = time.monotonic()
        prompt = np.array([rng.randrange(info.vocab_size) for _ in range(rng.randint(least, most))], dtype="<i4")
        submit = Submit(
            id=f"{name} {number}",
            prompt_tokens=prompt.size,
            params=SamplingParams(max_tokens=rng.randint(8, 48), temperature=0.0, ignore_eos=True),
            received_s=began,
            timeout_s=max(1.0, until - began + 5.0),
        )
        async for _ in client.generate(submit, prompt.tobytes()):
            pass
        await asyncio.sleep(rng.uniform(0.2, 1.2) * (time.monotonic() - began))
