"""Agent sessions beside chats, as served and as simulated: `python -m benchmarks.session_truth [--runs 2]`.

Profiles the embedded model on this machine, serves the sessions of `benchmarks.agent_sessions` in closed loop with
`headway serve` and its prefix cache, simulates the same requests with the measured table and a cache of the same size,
and prints tokens found in the cache and percentiles of the time to first token. Several runs against fresh servers say
how much of a difference is the machine's.
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
from typing import Any

import numpy as np

from benchmarks.agent_sessions import read_sessions
from headway.cli.main import main as headway
from headway.core.cpu_affinity import CORES
from headway.perf.hardware.processor import processor_name
from headway.runtime.embedded import model_path
from headway.serving.load.client import LoadClient, TargetEndpoint
from headway.serving.load.closed_loop import run_closed_loop
from headway.serving.load.endpoint import first_model
from headway.serving.load.goodput import GoodputTargets
from headway.serving.load.load_jobs import job_of
from headway.serving.load.prompts import PromptPool
from headway.serving.load.server_process import ServerProcess
from headway.serving.load.text_prompts import TextPrompts
from headway.sim.build import run_scenario, workload_of
from headway.sim.metrics import RequestRecord
from headway.sim.metrics.definitions import ttft_s
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
        for _ in range(arguments.runs):
            with ServerProcess([str(model_path()), *flags]) as server:
                served.append(figures(asyncio.run(serve(server.url, requests))))
        simulated = figures(run_scenario(scenario, 0).sim.records)
    rows: dict[str, Any] = {name: (simulated[name], [one[name] for one in served]) for name in simulated}
    turns = sum(one.klass == "turn" for one in requests)
    print(
        f"{turns} turns of {sum(one.prompt_tokens for one in requests):,} prompt tokens in all, {arguments.chats} chats"
    )
    for name, (expected, found) in rows.items():
        mean = float(np.mean(found))
        print(f"{name:>16}  simulated {expected:>10.4g}  served " + " ".join(f"{one:>10.4g}" for one in found)
              + f"  {expected / mean - 1:+.1%}, runs within {max(found) / min(found) - 1:.1%}")  # fmt: skip
    if arguments.keep is not None:
        (folder / "rows.json").write_text(json.dumps(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
