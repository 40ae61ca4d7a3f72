"""Live calibration, the second half of `headway profile`: serve for some seconds, and correct the table by the times.

The load is chats and occasional documents, with pauses, over HTTP on this host as `headway bench` sends it. The engine
learns scales that include what a table measured point by point lacks: cold caches, wake-ups, the server and its client
on the same cores. `perf.latency.calibrated_table` applies the scales to the table.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from headway.core.scratch_folder import ScratchFolder
from headway.core.settings import print_config
from headway.perf.latency import store
from headway.perf.latency.calibrated_table import bake
from headway.perf.latency.corrected import CorrectedLatency
from headway.perf.latency.serving_overhead import ServingOverhead
from headway.perf.latency.table_latency import TableSource
from headway.serving.load.client import LoadClient, LoadRequest, TargetEndpoint
from headway.serving.load.endpoint import first_model
from headway.serving.load.server_process import ServerError, ServerProcess
from headway.sim.calibration import scales_of
from headway.sim.metrics import RequestRecord
from headway.sim.metrics.definitions import ttft_s
from headway.sim.replay import read_log, replay
from headway.sim.replayed_run import ReplayedRun

CHATS = 3
"""Concurrent users with short prompts, beside one with long prompts."""
_MIN_ITERATIONS = 50
"""Iterations below which the table is not corrected."""
_MAX_OUTPUT = 48
"""Most output tokens of a request."""


def calibrate_live(
    model: str, settings: Mapping[str, Any], vocabulary: int, source: TableSource, seconds: float, seed: int = 0
) -> tuple[TableSource, int]:
    """Serve a seeded mixture for about `seconds`; return the corrected table and the number of iterations.

    With too few iterations the table comes back as it is. settings: of `headway serve`, in place of the environment's;
    vocabulary: exclusive bound of the prompts' token ids. Raises ServerError, also when a request fails.
    """
    folder = ScratchFolder("headway-profile-")
    try:
        table, log, file = folder.path / "table.json", folder.path / "run.jsonl", folder.path / "serve.yaml"
        store.save(source, table)
        file.write_text(print_config(settings))
        # HEADWAY_ variables would override the settings under test.
        own = {name: value for name, value in os.environ.items() if not name.startswith("HEADWAY_")}
        arguments = [model, "--config", str(file), "--latency-profile", str(table), "--event-log", str(log)]
        with ServerProcess(arguments, environment=own) as server:
            records = asyncio.run(_serve(server.url, vocabulary, seconds, seed))
        run = replay(read_log(log))
        learned, iterations = learned_table(source, run)
        return msgspec.structs.replace(learned, serving=overhead_of(run, records)), iterations
    finally:
        folder.close()


def learned_table(source: TableSource, run: ReplayedRun) -> tuple[TableSource, int]:
    """Apply the scales that a run shows which started from `source`; return the table and the number of iterations."""
    iterations = len(run.batches)
    if not isinstance(run.model, CorrectedLatency) or iterations < _MIN_ITERATIONS:
        return source, iterations
    scales = scales_of(run) or run.model.scales
    return bake(source, scales, f"corrected by {iterations:,} iterations of serving"), iterations


def overhead_of(run: ReplayedRun, records: Sequence[RequestRecord]) -> ServingOverhead:
    """Return what the server of a run added for the client that kept these records."""
    engine_s = {one.id.partition("#")[0]: seconds for one in run.records if (seconds := ttft_s(one)) is not None}
    sent = [one for one in records if one.token_s and one.sent_s is not None and one.id in engine_s]
    return ServingOverhead.of(
        [one.token_s[0] - (one.sent_s or 0.0) - engine_s[one.id] for one in sent],
        [one.woken_s - one.predicted_s for one in run.batches if one.woken_s is not None],
        [one.waited_s for one in run.batches if one.waited_s],
    )


async def _serve(url: str, vocabulary: int, seconds: float, seed: int) -> list[RequestRecord]:
    """Return the records of all requests."""
    served = first_model(url)
    most = int(served["max_model_len"])
    # A slow model must not extend the run by more than 5 s; a request that is cut off ends its user.
    endpoint = TargetEndpoint(base_url=url, model=str(served["id"]), timeout_s=seconds + 5.0)
    async with LoadClient(endpoint) as client:
        until = time.monotonic() + seconds
        # Documents of up to half the context, at most 8K tokens; room is what the output leaves.
        longest = max(1, min(most // 2, 8192))
        lengths = [(32, 512)] * CHATS + [(max(1, longest // 4), longest)]
        room = max(1, most - _MAX_OUTPUT)
        users = [
            _user(client, f"{seed}-{i}", vocabulary, until, min(low, room), min(high, room))
            for i, (low, high) in enumerate(lengths)
        ]
        return [record for records in await asyncio.gather(*users) for record in records]


async def _user(
    client: LoadClient, name: str, vocabulary: int, until: float, least: int, most: int
) -> list[RequestRecord]:
    """Act as one user until the monotonic time `until`: a prompt of `least` to `most` tokens, its answer, a pause.

    Pauses take 0.5 to 3 times as long as the answer. A request that times out is the last. Returns the records.
    """
    rng = random.Random(name)
    records: list[RequestRecord] = []
    while time.monotonic() < until:
        began = time.monotonic()
        ids = [rng.randrange(vocabulary) for _ in range(rng.randint(least, most))]
        job = LoadRequest(
            id=f"calibration-{name}-{len(records)}",
            prompt=msgspec.json.encode(ids),
            prompt_tokens=len(ids),
            output_tokens=rng.randint(8, _MAX_OUTPUT),
        )
        records.append(answer := await client.send(job))
        if answer.error is not None and answer.error.startswith("timeout"):
            break
        if answer.error is not None:
            raise ServerError(f"a request of the live calibration failed: {answer.error}")
        await asyncio.sleep(rng.uniform(0.5, 3.0) * (time.monotonic() - began))
    return records
