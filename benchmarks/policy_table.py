"""Compare policies and chunkings by workload and load in the simulator: `python -m benchmarks.policy_table`.

Virtual time, so figures do not depend on the machine that runs it (10 CPU minutes). Load is the work that arrives
in a second, in seconds of the instance. Short prompts have up to 8,192 tokens. "In time" is the share of requests
whose first token came by max(1 s, 5 × its prefill alone). Writes docs/reference/policies.md; `--quick` takes a few
requests and prints only. Traces that are not there are left out.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from headway.perf.hardware.accelerators import accelerator
from headway.perf.hardware.models import model
from headway.perf.latency.base import BatchLoad, LatencyModel, load_s
from headway.perf.latency.fitted import fitted
from headway.perf.latency.layout import ParallelLayout
from headway.perf.latency.prefill_cache import PrefillCache
from headway.perf.latency.tables import TableLatency, TableSource
from headway.policy.iteration.config import SchedulerConfig
from headway.sim import InstanceSpec, simulate
from headway.sim.metrics.definitions import tbt_s, ttft_s
from headway.sim.metrics.record import RequestRecord
from headway.sim.runner import run_in_processes
from headway.sim.workload import TraceRequest
from headway.sim.workload.readers import read_trace

SHARED = Path(os.environ.get("HEADWAY_SHARED", Path(__file__).resolve().parents[2] / "shared")) / "data" / "traces"
PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "policies.md"
TRACES = {
    "azure 2023 conversation": SHARED / "azure-llm-2023" / "AzureLLMInferenceTrace_conv.csv.gz",
    "mooncake conversation": SHARED / "mooncake-conversation" / "conversation_0-2400s.jsonl.gz",
}
SYNTHETIC = ("chats and documents", "convoy on a slow processor")
LOADS = (0.5, 0.8, 0.95, 1.1)
LONG_TOKENS = 8192
FIXED = {"t_target_s": 0.055, "newcomer_wait_s": 0.0}
CHUNKINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "55 ms always": FIXED,
    "static:512": {"chunking": "static:512"},
    "whole": {"chunking": "whole"},
    "space shared": {"space_sharing": True},
}
CHOICES = (
    *(("lars", chunking) for chunking in ("default", "55 ms always", "static:512", "whole")),
    ("srpt", "space shared"),
    *((policy, "default") for policy in ("srpt", "edf", "fcfs")),
)


class Cell(NamedTuple):
    """One simulation."""

    workload: str
    load: float
    policy: str
    chunking: str
    requests: int


class Row(NamedTuple):
    """Its result: quantiles in seconds, (P50, P99, worst) of the time to the first token by class."""

    cell: Cell
    short: tuple[float, float, float]
    long: tuple[float, float, float]
    gap_p99_s: float
    in_time: float


def slow_processor() -> LatencyModel:
    """Return a small model in fp32 on two cores without matrix units: 20 ms a step, 0.35 ms a token, and small chunks
    attend at half the rate of large ones (the shape of what was measured on such a processor; not a measurement)."""
    each_s = 1.2e-7
    loss = ((8, 2.2), (32, 1.6), (128, 1.25), (512, 1.05), (2048, 1.0), (8192, 1.0))
    source = TableSource(
        fingerprint="slow processor",
        provenance="illustrative",
        status="derived",
        tokens=((0, 0.018), (1, 0.018), (8192, 0.018 + 8192 * 3.5e-4)),
        chunks=((0, 0.0, 0.0), *((c, c * c / 2 * each_s * x, c * each_s * x) for c, x in loss)),
        decode=(0.0, 1e-3, each_s),
    )
    return TableLatency(source)


def machine(workload: str) -> tuple[LatencyModel, int]:
    """Return the latency model and KV tokens of the instance that serves a workload."""
    if workload == "convoy on a slow processor":
        return slow_processor(), 400_000
    device = accelerator("a100-80gb")
    return fitted(device, model("llama-3-8b"), ParallelLayout(tp=1, stages=1), 0), 440_000


def lengths(workload: str, count: int) -> list[TraceRequest]:
    """Return the requests of a workload; arrival times are scaled to a load later."""
    rng = np.random.default_rng(0)
    if workload == "chats and documents":
        at = np.cumsum(rng.exponential(1.0, count))
        long = rng.random(count) < 0.03
        prompt = np.where(long, rng.integers(30_000, 100_000, count), rng.lognormal(6.2, 0.9, count).clip(20, 8000))
        return [
            TraceRequest(float(a), int(p), int(o))
            for a, p, o in zip(at, prompt, rng.integers(50, 300, count), strict=True)
        ]
    if workload == "convoy on a slow processor":
        at = np.arange(count) + rng.random(count) * 0.9
        every = max(2, count // 6)
        return [TraceRequest(float(a), 16_384 if i % every == 0 else 200, 16) for i, a in enumerate(at)]
    trace = read_trace(TRACES[workload]).requests[:count]
    return [replace(r, prompt_tokens=min(r.prompt_tokens, 120_000), cached_tokens=0, session=None) for r in trace]


def at_load(requests: Sequence[TraceRequest], latency: LatencyModel, load: float) -> list[TraceRequest]:
    """Stretch arrival times so that `load` seconds of work arrive in a second. A decode counts as one of 16."""
    times = PrefillCache(latency, 0.25)
    work_s = 0.0
    for r in requests:
        step_s = load_s(latency, BatchLoad(16, 16, 16 * r.prompt_tokens)) / 16
        work_s += times.total_s(r.prompt_tokens) + step_s * r.output_tokens
    factor = work_s / load / max(requests[-1].arrival_s, 1e-9)
    return [_classified(replace(r, arrival_s=r.arrival_s * factor)) for r in requests]


def _classified(request: TraceRequest) -> TraceRequest:
    return replace(request, klass="long" if request.prompt_tokens > LONG_TOKENS else "short")


def run(cell: Cell) -> Row:
    """Simulate one cell."""
    latency, kv_tokens = machine(cell.workload)
    if cell.workload == "convoy on a slow processor":
        # As it is: one chat a second; the load is what it is.
        requests = [
            replace(r, klass="long" if r.prompt_tokens > LONG_TOKENS else "short")
            for r in lengths(cell.workload, cell.requests)
        ]
    else:
        requests = at_load(lengths(cell.workload, cell.requests), latency, cell.load)
    config = SchedulerConfig(policy=cell.policy, max_num_seqs=256, **CHUNKINGS[cell.chunking])
    result = simulate(InstanceSpec(config=config, latency=latency, kv_tokens=kv_tokens), requests)
    times = PrefillCache(latency, 0.25)
    in_time = [
        (ttft_s(record) or np.inf) <= max(1.0, 5 * times.total_s(record.prompt_tokens)) for record in result.records
    ]
    gaps = [gap for record in result.records for gap in tbt_s(record)]
    return Row(
        cell,
        _quantiles(result.records, "short"),
        _quantiles(result.records, "long"),
        float(np.quantile(gaps, 0.99)),
        sum(in_time) / len(in_time),
    )


def _quantiles(records: Sequence[RequestRecord], klass: str) -> tuple[float, float, float]:
    found = [ttft_s(record) or np.inf for record in records if record.klass == klass] or [np.nan]
    return float(np.quantile(found, 0.5)), float(np.quantile(found, 0.99)), float(max(found))


def cells(workloads: Sequence[str], requests: int) -> Iterator[Cell]:
    """Yield all combinations."""
    for workload in workloads:
        for load in LOADS if workload != "convoy on a slow processor" else (0.0,):
            for policy, chunking in CHOICES:
                yield Cell(workload, load, policy, chunking, requests)


def table(rows: Sequence[Row]) -> list[str]:
    """Return the rows as a Markdown table."""
    lines = [
        "| workload | load | policy | short P50 / P99 / worst | long P50 / P99 / worst | gap P99, ms | in time |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cell = row.cell
        short, long = (
            "–" if np.isnan(three[0]) else " / ".join(f"{value:.3g}" for value in three)
            for three in (row.short, row.long)
        )
        load = f"{cell.load:g}" if cell.load else "–"
        lines.append(
            f"| {cell.workload} | {load} | {cell.policy}, {cell.chunking} | {short} | {long} "
            f"| {row.gap_p99_s * 1e3:.0f} | {row.in_time:.1%} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--quick", action="store_true", help="few requests, print only")
    parser.add_argument("--workloads", nargs="+", help="only these")
    parser.add_argument("--requests", type=int, default=800, help="of each workload")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    workloads = arguments.workloads or [*SYNTHETIC, *(name for name, path in TRACES.items() if path.exists())]
    rows = list(
        run_in_processes(run, list(cells(workloads, 200 if arguments.quick else arguments.requests)), arguments.jobs)
    )
    lines = table(rows)
    print("\n".join(lines))
    if not arguments.quick and not arguments.workloads:
        head = PAGE.read_text().split("<!-- table -->")[0]
        PAGE.write_text(f"{head}<!-- table -->\n\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
