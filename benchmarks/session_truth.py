"""Agent sessions beside chats, as served and as simulated: `python -m benchmarks.session_truth [--runs 2]`.

Profiles the embedded model on this machine, serves the sessions of `benchmarks.agent_sessions` in closed loop with
`headway serve` and its prefix cache, simulates the same requests with the measured table and a cache of the same size,
and prints tokens found in the cache and percentiles of the time to first token. How much of a difference is the
machine's: several runs against fresh servers say that, and a second simulation of each run, whose iterations are as
long as the server's event log says (`sim.calibration.corrected_table`: four factors of the profile, the spread, and the
engine's own times; what clients measured is no part of it). The log is replayed: every decision has to be the same.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.agent_sessions import read_sessions
from headway.cli.main import main as headway
from headway.core.machine import CORES
from headway.perf.device import processor_name
from headway.perf.latency.table import HostedLatency
from headway.runtime.embedded import model_path
from headway.serving.load.calibration import overhead_of
from headway.serving.load.client import LoadClient, TargetEndpoint, first_model, run_closed_loop
from headway.serving.load.convoy import ServerProcess
from headway.serving.load.load import GoodputTargets, job_of
from headway.serving.load.prompts import PromptPool, TextPrompts
from headway.sim.build import instance_of, run_of, run_scenario, workload_of
from headway.sim.calibration import corrected_table, scales_of
from headway.sim.loop import simulate
from headway.sim.metrics import RequestRecord, ttft_s
from headway.sim.replay import ReplayedRun, read_log, replay
from headway.sim.scenario import Scenario, parse_scenario
from headway.sim.workload import TraceRequest

KV_TOKENS = 400_000
ANSWER = 16
CHAT = ("chat", 128, 16)
CUTS = (50, 90)


def write_trace(path: Path, most_tokens: int, sessions: int, chats: int) -> None:
    """Write sessions, and chats evenly among them, each chat a session of its own."""
    found = read_sessions(most_tokens, sessions)
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("arrival_s", "prompt_tokens", "output_tokens", "class", "cached_tokens", "session", "think_s"))
        for place in range(chats):
            if place * len(found) % chats < len(found):
                number = place * len(found) // chats
                for turn in found[number]:
                    rows.writerow((place, turn.prompt, ANSWER, "turn", turn.cached, f"agent {number}", 0.5))
            name, prompt, output = CHAT
            rows.writerow((place, prompt, output, name, 0, f"chat {place}", 0.0))


def scenario_of(table: Path, trace: Path, qps: float) -> Scenario:
    """Return the scenario: this machine, and sessions that start at random."""
    return parse_scenario(
        {
            "model": str(model_path()),
            "latency": {"source": "table", "file": str(table), "learns": True},
            "memory": {"kv_tokens": KV_TOKENS},
            "prefix_cache": {"size": "pool"},
            "workload": {"trace": str(trace), "sessions": {}, "arrivals": "poisson", "qps": qps},
        }
    )


async def serve(url: str, requests: list[TraceRequest]) -> list[RequestRecord]:
    """Send the requests in closed loop and return their records."""
    pool = PromptPool(np.random.default_rng(1), longest=max(one.prompt_tokens for one in requests))
    endpoint = TargetEndpoint(base_url=url, model=str(first_model(url)["id"]), timeout_s=600)
    make = partial(job_of, goodput=GoodputTargets(()), keep_ids=True)
    async with LoadClient(endpoint) as client:
        records = (await run_closed_loop(client, requests, TextPrompts(pool), make)).records
    # That the client makes a prompt before it sends it is no time of the server's.
    return [replace(one, arrival_s=one.sent_s or one.arrival_s) for one in records]


def figures(records: Sequence[RequestRecord]) -> dict[str, float]:
    """Return cached tokens, and percentiles of times to first token in seconds, by class."""
    assert all(one.ok for one in records), next(one.error for one in records if not one.ok)
    found: dict[str, float] = {"cached tokens": sum(one.cached_tokens for one in records)}
    for klass in ("turn", "chat"):
        times = [seconds for one in records if one.klass == klass and (seconds := ttft_s(one)) is not None]
        found |= {f"{klass} TTFT P{cut}": float(np.percentile(times, cut)) for cut in CUTS}
    return found


def at_speed_of(run: ReplayedRun, scenario: Scenario, requests: list[TraceRequest]) -> Sequence[RequestRecord]:
    """Simulate the requests with iterations as long as the run's were; predictions start from the profile, as its did.

    The engine's own times come from its log too; what a request takes on its way, and to wake an idle server, is the
    profile's: clients see that."""
    spec, own = instance_of(scenario, requests), overhead_of(run, ())
    actual = HostedLatency(corrected_table(run), own.iteration_s)
    serving = own.with_way_of(spec.serving)
    return simulate(replace(spec, actual_latency=actual, serving=serving), requests, run_of(scenario, 0)).records


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most-tokens", type=int, default=24_000, help="longest prompt of a session")
    parser.add_argument("--sessions", type=int, default=6, help="most sessions")
    parser.add_argument("--chats", type=int, default=60)
    parser.add_argument("--qps", type=float, default=1.5, help="sessions and chats started a second")
    parser.add_argument("--runs", type=int, default=2, help="times that the sessions are served")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the profile there, and use the one that is")
    arguments = parser.parse_args()
    print(f"{processor_name()}, {len(CORES)} cores")
    with tempfile.TemporaryDirectory() as temporary:
        folder: Path = arguments.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        table, trace = folder / "table.json", folder / "trace.csv"
        # One core computes, one is the client's.
        threads = ["--threads", "1"]
        wanted = ["profile", "--budget", "20", "--serve-for", "20", "--out", str(table), *threads]
        if not table.exists() and headway(wanted):
            return 1
        write_trace(trace, arguments.most_tokens, arguments.sessions, arguments.chats)
        scenario = scenario_of(table, trace, arguments.qps)
        requests = workload_of(scenario, 0)
        flags = ["--latency-profile", str(table), "--kv-cache-memory", "1G", "--prefix-cache", *threads]
        served: list[dict[str, float]] = []
        again: list[dict[str, float]] = []
        for number in range(arguments.runs):
            log = folder / f"run-{number}.jsonl"
            with ServerProcess([str(model_path()), *flags, "--event-log", str(log)]) as server:
                served.append(figures(asyncio.run(serve(server.url, requests))))
            replayed = replay(read_log(log))
            assert not replayed.differences, replayed.differences[0]
            scales = ", ".join(f"{scale:.2f}" for scale in scales_of(replayed) or ())
            print(f"run {number}: {len(replayed.batches)} iterations decided alike in a replay; they took, of the "
                  f"profile's times, {scales} (fixed, rows, decodes, chunks)")  # fmt: skip
            again.append(figures(at_speed_of(replayed, scenario, requests)))
        simulated = figures(run_scenario(scenario, 0).sim.records)
    turns = sum(one.klass == "turn" for one in requests)
    print(f"{turns} turns of {sum(one.prompt_tokens for one in requests):,} prompt tokens, {arguments.chats} chats")
    for name, expected in simulated.items():
        found = [one[name] for one in served]
        print(f"{name:>16}  simulated {expected:>9.4g} ({expected / float(np.mean(found)) - 1:+.0%}); served, and "
              "simulated at its speed: "
              + ", ".join(f"{one:.4g} {other[name]:.4g} ({other[name] / one - 1:+.1%})"
                          for one, other in zip(found, again, strict=True)))  # fmt: skip
    if arguments.keep is not None:
        (folder / "rows.json").write_text(json.dumps({"simulated": simulated, "served": served, "again": again}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
