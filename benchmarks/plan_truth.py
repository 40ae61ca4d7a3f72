"""What `headway plan` predicts for this machine, beside what it then serves: `python -m benchmarks.plan_truth`.

Measures the embedded model (`headway profile`), asks for the plan of chats beside documents on this one machine, starts
`headway serve` with the plan's setting, sends the plan's own requests at their times, and prints each percentile as
predicted and as served; and as the plan predicts it once the profile's iteration times are those of this run, which
tells the plan's error from what the machine's speed changed between profile and run. Runs for about two minutes and a
half; `--json FILE` writes the rows.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from headway.cli.main import main as headway
from headway.core.machine import CORES
from headway.perf.device import processor_name
from headway.perf.latency import table as store
from headway.planning.question import LatencyDemand, PlanQuestion, parse_question
from headway.planning.search import PlanSearch
from headway.planning.simulate import SimulationJob, measure, values_of, workload_of
from headway.runtime.embedded import model_path
from headway.serving.load.calibration import learned_table, overhead_of
from headway.serving.load.client import LoadClient, LoadRequest, TargetEndpoint, first_model, run_open_loop
from headway.serving.load.convoy import ServerProcess
from headway.serving.load.prompts import PromptPool
from headway.sim.calibration import scales_of
from headway.sim.metrics import RequestRecord
from headway.sim.replay import ReplayedRun, read_log, replay
from headway.sim.workload import TraceRequest

KV_TOKENS = 200_000
DEMANDS = {
    "chat": {"ttft_p50_s": 30.0, "ttft_p90_s": 30.0, "ttft_p99_s": 30.0, "tbt_p50_s": 5.0, "tbt_p99_s": 5.0},
    "document": {"ttft_p50_s": 300.0, "e2e_p50_s": 300.0},
}
"""Limits that no machine misses: what is compared are the figures."""


def question_of(table: Path, qps: float, requests: int) -> PlanQuestion:
    """Return the question: one machine, its measured table, three iteration lengths to choose from."""
    chats = {"class": "chat", "share": 0.97, "prompt": "lognormal:median=200,p90=600", "output": "fixed:16"}
    documents = {"class": "document", "share": 0.03, "prompt": "fixed:16000", "output": "fixed:16"}
    data: dict[str, Any] = {
        "name": "This machine",
        "model": str(model_path()),
        # a name has to stand here: the table predicts iterations, `kv_tokens` the cache; only the MFU would be wrong
        "accelerators": [{"name": "a100-80gb", "most": 1}],
        "workload": {"qps": qps, "requests": requests, "mix": [chats, documents]},
        "demands": DEMANDS,
        "search": {"tp": [1], "stages": [1], "split": False, "t_target_s": [0.03, 0.06, 0.12]},
        "latency": {"source": "table", "file": str(table), "learns": True},
        "memory": {"kv_tokens": KV_TOKENS},
    }
    return parse_question(data)


async def serve_all(url: str, workload: list[TraceRequest]) -> list[RequestRecord]:
    """Send the requests at their times and return their records."""
    served = first_model(url)
    pool = PromptPool(np.random.default_rng(1), longest=max(one.prompt_tokens for one in workload))
    jobs = [
        LoadRequest(
            id=f"r{number}", klass=one.klass, due_s=one.arrival_s, prompt=pool.json(one.prompt_tokens),
            prompt_tokens=one.prompt_tokens, output_tokens=one.output_tokens,
        )
        for number, one in enumerate(workload)
    ]  # fmt: skip
    async with LoadClient(TargetEndpoint(base_url=url, model=str(served["id"]), timeout_s=600)) as client:
        return (await run_open_loop(client, jobs)).records


def percentile_of(demand: LatencyDemand, records: list[RequestRecord]) -> float:
    """Return a demand's percentile over the records of its class, in seconds."""
    values = [value for one in records if one.klass == demand.klass for value in values_of(demand, one)]
    return float(np.percentile(values, demand.percent))


def at_speed_of(run: ReplayedRun, table: Path, into: Path) -> None:
    """Write a copy of the profile with iteration times, their spread and the engine's own time as this run's were.

    What a request takes on its way, and to wake an idle server, is the profile's: clients see that."""
    source = store.load(table, None)
    learned, _ = learned_table(source, run)
    assert source.serving is not None, "profiled with --serve-for"
    serving = overhead_of(run, ()).with_way_of(source.serving)
    store.save(msgspec.structs.replace(learned, serving=serving), into)


def drift(run: ReplayedRun) -> str:
    """Return how much faster or slower the machine was than while it was profiled: no plan can know that."""
    scales = scales_of(run)
    return (
        "too few"
        if scales is None
        else ", ".join(
            f"{name} {scale:.2f}" for name, scale in zip(("fixed", "rows", "decodes", "chunks"), scales, strict=True)
        )
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--qps", type=float, default=2.0)
    parser.add_argument("--requests", type=int, default=160)
    parser.add_argument("--budget", default="20", help="seconds of the profile")
    parser.add_argument("--serve-for", default="20", help="seconds of serving that the profile is corrected by")
    parser.add_argument("--threads", type=int, help="of the profile and of the server; 1: a core is the client's")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the profile and the server's event log there")
    arguments = parser.parse_args()
    print(f"{processor_name()}, {len(CORES)} cores")
    with contextlib.ExitStack() as stack:
        folder = arguments.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        table = folder / "table.json"
        threads = ["--threads", str(arguments.threads)] if arguments.threads else []
        wanted = ["--budget", arguments.budget, "--serve-for", arguments.serve_for, "--out", str(table), *threads]
        if headway(["profile", *wanted]):
            return 1
        question = question_of(table, arguments.qps, arguments.requests)
        plan = PlanSearch(question).run().best
        assert plan is not None, "limits that no machine misses"
        print(f"plan: {plan.candidate.name}")
        target = f"{plan.candidate.t_target_s * 1000:g}"
        flags = [
            "--latency-profile",
            str(table),
            "--t-target-ms",
            target,
            "--kv-cache-memory",
            "1G",
            "--prefix-cache",
            "false",
            *threads,
        ]
        log = folder / "run.jsonl"
        flags += ["--event-log", str(log)]
        with ServerProcess([str(model_path()), *flags]) as server:
            records = asyncio.run(serve_all(server.url, workload_of(question, 0)))
        run = replay(read_log(log))
        print(f"iterations took so many times what the profile says: {drift(run)}")
        own = folder / "run-table.json"
        at_speed_of(run, table, own)
        again = measure(
            SimulationJob(question_of(own, arguments.qps, arguments.requests), plan.candidate, to_the_end=True)
        )
    failed = [one.error for one in records if not one.ok]
    assert not failed, failed[:3]
    late_s = [(one.sent_s or one.arrival_s) - one.arrival_s for one in records]
    print(
        f"the client sent {1e3 * float(np.median(late_s)):.1f} ms late (median), which is not the server's and left out"
    )
    records = [replace(one, arrival_s=one.sent_s or one.arrival_s) for one in records]
    rows = []
    for number, demand in enumerate(question.demand_list()):
        predicted, served = plan.worst_s(number), percentile_of(demand, records)
        at_speed = again.worst_s(number)
        rows.append({"demand": demand.name, "predicted_s": predicted, "served_s": served, "at_its_speed_s": at_speed})
        print(f"{demand.name:>20} {predicted * 1000:>9.1f} ms predicted {served * 1000:>9.1f} ms served"
              f" {predicted / served - 1:>+7.1%}; at the run's iteration times"
              f" {at_speed / served - 1:>+7.1%}")  # fmt: skip
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
