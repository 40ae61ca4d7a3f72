"""Live calibration, the second half of `headway profile`: serve for some seconds, and correct the table by the times.

The load is chats and occasional documents, over HTTP on this host as `headway bench` sends it: for half of the time
several users at once, then one user alone with long pauses, since a host that was idle is slower, and since cores that
share a host's memory or clock are faster while the others rest. The engine learns
scales that include what a table measured point by point lacks: cold caches, wake-ups, the server and its client on the
same cores. `perf.latency.table` applies the scales to the table.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Mapping, Sequence
from operator import mul
from typing import Any, NamedTuple

import msgspec

from headway.core.files import ScratchFolder
from headway.core.settings import print_config
from headway.perf.latency import table as store
from headway.perf.latency.corrected import CorrectedLatency
from headway.perf.latency.table import ServingOverhead, TableSource, bake, spreads_of
from headway.serving.load.client import LoadClient, LoadRequest, TargetEndpoint, first_model
from headway.serving.load.convoy import ServerError, ServerProcess
from headway.sim.calibration import scales_of
from headway.sim.metrics import RequestRecord, ttft_s
from headway.sim.replay import BatchTimes, ReplayedRun, read_log, replay

CHATS = 3
"""Concurrent users with short prompts, beside one with long prompts."""
_MIN_ITERATIONS = 50
"""Iterations below which the table is not corrected."""
_MAX_OUTPUT = 48
"""Most output tokens of a request."""
_BUSY_PAUSES = (0.5, 3.0)
"""Least and greatest pause of a user among others, in times of the answer before it."""
_LONG_PAUSES = (3.0, 10.0)
"""The same of the user alone."""


class _CalibrationRecords(NamedTuple):
    """Requests by the load that they ran under."""

    busy: list[RequestRecord]
    """Requests of several users at once."""
    alone: list[RequestRecord]
    """Requests of one user, each sent a while after the previous answer."""


def calibrate_live(
    model: str, settings: Mapping[str, Any], vocabulary: int, source: TableSource, seconds: float
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
            records = asyncio.run(_serve(server.url, vocabulary, seconds))
        run = replay(read_log(log))
        learned, iterations = learned_table(source, run)
        return msgspec.structs.replace(learned, serving=overhead_of(run, *records)), iterations
    finally:
        folder.close()


def learned_table(source: TableSource, run: ReplayedRun) -> tuple[TableSource, int]:
    """Apply the scales that a run shows which started from `source`; return the table and the number of iterations."""
    iterations = len(run.batches)
    if not isinstance(run.model, CorrectedLatency) or iterations < _MIN_ITERATIONS:
        return source, iterations
    scales = scales_of(run) or run.model.scales
    return bake(source, scales, f"corrected by {iterations:,} iterations of serving"), iterations


def overhead_of(
    run: ReplayedRun, records: Sequence[RequestRecord], alone: Sequence[RequestRecord] = ()
) -> ServingOverhead:
    """Return what the server of a run added for the client that kept these records.

    alone: of requests that met a server which had been idle; what these take longer on their way counts as idling."""
    engine_s = {one.id.partition("#")[0]: seconds for one in run.records if (seconds := ttft_s(one)) is not None}

    def added_s(sent: Sequence[RequestRecord]) -> list[tuple[int, float]]:
        return [
            (one.prompt_tokens, one.token_s[0] - (one.sent_s or 0.0) - engine_s[one.id])
            for one in sent
            if one.token_s and one.sent_s is not None and one.id in engine_s
        ]

    scales = scales_of(run)

    def predicted_s(one: BatchTimes) -> float:
        """Return an iteration's time by the corrected table, which simulations add to."""
        return one.predicted_s if scales is None or one.terms is None else sum(map(mul, one.terms, scales))

    overhead = ServingOverhead.of(
        added_s(records),
        [one.woken_s - predicted_s(one) for one in run.batches if one.woken_s is not None],
        [one.waited_s for one in run.batches if one.waited_s],
    )
    woken = ServingOverhead.of(added_s(alone), (), ())
    if woken.request_s > overhead.request_s > 0.0:
        longer_s = woken.request_s - overhead.request_s
        overhead = msgspec.structs.replace(overhead, idle_s=overhead.idle_s + longer_s)
    if scales is None:
        return overhead
    # after an idle engine the time before is not the engine's own
    busy = [each for each in run.batches if each.terms is not None and each.waited_s]
    spread = spreads_of(
        [predicted_s(each) + overhead.iteration_s for each in busy], [each.elapsed_s + each.waited_s for each in busy]
    )
    return msgspec.structs.replace(overhead, spread=spread)


async def _serve(url: str, vocabulary: int, seconds: float) -> _CalibrationRecords:
    """Return the records of all requests."""
    served = first_model(url)
    most = int(served["max_model_len"])
    # A slow model must not extend the run by more than 5 s; a request that is cut off ends its user.
    endpoint = TargetEndpoint(base_url=url, model=str(served["id"]), timeout_s=seconds + 5.0)
    async with LoadClient(endpoint) as client:
        half, end = (time.monotonic() + share * seconds for share in (0.5, 1.0))
        # Documents of up to half the context, at most 8K tokens; room is what the output leaves.
        longest, room = max(1, min(most // 2, 8192)), max(1, most - _MAX_OUTPUT)
        short, long = ((min(low, room), min(high, room)) for low, high in ((32, 512), (max(1, longest // 4), longest)))
        users = [
            _user(client, f"0-{i}", vocabulary, half, lengths, _BUSY_PAUSES)
            for i, lengths in enumerate([short] * CHATS + [long])
        ]
        busy = [record for records in await asyncio.gather(*users) for record in records]
        await _user(client, "0-document", vocabulary, half + 0.4 * (end - half), long, _BUSY_PAUSES)
        return _CalibrationRecords(busy, await _user(client, "0-alone", vocabulary, end, short, _LONG_PAUSES))


async def _user(
    client: LoadClient,
    name: str,
    vocabulary: int,
    until: float,
    lengths: tuple[int, int],
    pauses: tuple[float, float],
) -> list[RequestRecord]:
    """Act as one user until the monotonic time `until`: a prompt of so many tokens, least and most, its answer, a pause
    of so many times the answer's time. A request that times out is the last. Returns the records."""
    rng = random.Random(name)
    records: list[RequestRecord] = []
    while time.monotonic() < until:
        began = time.monotonic()
        ids = [rng.randrange(vocabulary) for _ in range(rng.randint(*lengths))]
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
        await asyncio.sleep(rng.uniform(*pauses) * (time.monotonic() - began))
    return records
