"""Comparison of the simulator with a live run, and the live run's requests as a workload."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headway.core.files import open_input
from headway.perf.latency.base import LatencyModel
from headway.perf.latency.corrected import fit_scales
from headway.perf.latency.table import HostedLatency, TableLatency, bake
from headway.policy.iteration.config import SchedulerConfig
from headway.sim.loop import simulate
from headway.sim.metrics import RequestRecord, RunSummary, percentiles, summarise
from headway.sim.replay import ReplayedRun, engine_log, replay
from headway.sim.result import SimResult
from headway.sim.spec import InstanceSpec, RunSpec, VllmSpec
from headway.sim.workload import TraceRequest
from headway.sim.workload.traces import RequestTrace, TraceError

_START = b'{"event":"start"'


def is_event_log(path: Path) -> bool:
    """Return whether a file begins as an event log does. False for one that cannot be read."""
    try:
        with open_input(path) as file:
            return file.read(len(_START)) == _START
    except OSError:
        return False


def requests_in(run: ReplayedRun, records: Sequence[RequestRecord]) -> list[TraceRequest]:
    """Return recorded requests, which arrive in this order, with times from the first one's arrival."""
    zero_s = records[0].arrival_s if records else 0.0
    asked = run.requests
    return [
        TraceRequest(
            r.arrival_s - zero_s,
            r.prompt_tokens,
            r.output_tokens,
            r.klass,
            asked[r.id].cached_tokens,
            priority=asked[r.id].priority,
        )
        for r in records
    ]


def recorded_trace(path: Path) -> RequestTrace:
    """Return the requests of a log that were answered, with the lengths of their answers. Raises ConfigError."""
    run = replay(engine_log(path))
    answered = sorted((record for record in run.records if record.ok), key=lambda record: record.arrival_s)
    if not answered:
        raise TraceError(f"{path}: no request of this event log was answered")
    return RequestTrace(path.name, "event log", tuple(requests_in(run, answered)))


SCHEMA = "headway.calibration/1"
_LEAST_ITERATIONS = 20
"""Below which the scales learned meanwhile are better than a fit."""


@dataclass(frozen=True)
class CalibrationReport:
    """Prediction errors of iterations, |predicted / measured - 1|, and latencies as measured and as simulated."""

    iterations: int
    running: dict[str, float | None]
    """Errors of the running scheduler's predictions, which it corrected meanwhile: mean, p50 and p90."""
    profile: dict[str, float | None]
    """Errors of the profile that the scheduler started from: mean, p50 and p90."""
    host_s: float
    """Median time of the engine's own between two batches."""
    measured: RunSummary
    simulated: RunSummary

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "iterations": self.iterations,
            "iteration_error": {"running": self.running, "profile": self.profile},
            "host_s": self.host_s,
            "measured": self.measured.to_json(),
            "simulated": self.simulated.to_json(),
        }


def calibrate(run: ReplayedRun, corrected: bool = False) -> CalibrationReport:
    """Simulate the requests of a recorded run on its own profile, and compare.

    The engine's own time between two batches (`host_s`, the median of the run) is added to every iteration; nothing
    else is taken from the measurement. Requests that were aborted are left out on both sides.
    `corrected`: take iteration times from the profile as all of the run's iterations correct it.
    """
    # aborted requests would run to their end in the simulation
    live = sorted((r for r in run.records if r.ok), key=lambda record: record.arrival_s)
    simulated = simulate_again(run, live, run.config, corrected)
    return CalibrationReport(
        iterations=len(run.batches),
        running=_errors([(batch.predicted_s, batch.elapsed_s) for batch in run.batches]),
        profile=_errors([(batch.profile_s, batch.elapsed_s) for batch in run.batches]),
        host_s=host_s_of(run),
        measured=summarise(live),
        simulated=simulated.summary(),
    )


def host_s_of(run: ReplayedRun) -> float:
    """Return the engine's own time between two iterations: the median of the run, seconds."""
    return float(np.median([batch.waited_s for batch in run.batches])) if run.batches else 0.0


def scales_of(run: ReplayedRun) -> tuple[float, ...] | None:
    """Return the scales of its profile that the run's iterations show; None where there are too few, or none whose
    terms are known (those after an idle engine are not: `ServingOverhead.idle_s`)."""
    known = [(each.terms, each.elapsed_s) for each in run.batches if each.terms is not None and each.woken_s is None]
    return fit_scales([terms for terms, _ in known], [s for _, s in known]) if len(known) >= _LEAST_ITERATIONS else None


def corrected_table(run: ReplayedRun) -> LatencyModel:
    """Return the run's profile as its iterations correct it: by `scales_of`, else by what was learned at its end."""
    scales = scales_of(run)
    return run.model if scales is None else TableLatency(bake(run.table.source, scales, "corrected"))


def simulate_again(
    run: ReplayedRun, records: Sequence[RequestRecord], config: SchedulerConfig, corrected: bool
) -> SimResult:
    """Simulate requests of a recorded run, in order of arrival, on its profile under any scheduler settings.

    `corrected`: see `calibrate`. The result's records are in the order of `records`, with times from the first
    arrival."""
    spec = InstanceSpec(
        config=config,
        latency=run.table,
        actual_latency=HostedLatency(corrected_table(run) if corrected else run.table, host_s_of(run)),
        learns=run.model is not run.table,
        kv_tokens=run.kv_tokens,
        block_tokens=run.block_tokens,
        vllm=_vllm_of(run, config) if run.engine == "vllm" else None,
    )
    return simulate(spec, requests_in(run, records), RunSpec(send_slo=False, keep_iterations=True))


def _vllm_of(run: ReplayedRun, config: SchedulerConfig) -> VllmSpec:
    """Return vLLM as it ran, with the plug-in's policy under these settings."""
    return VllmSpec(
        # One more: the null block.
        num_blocks=run.kv_tokens // run.block_tokens + 1,
        block_size=run.block_tokens,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        async_scheduling=run.asynchronous,
        plugged=config,
    )


def _errors(pairs: list[tuple[float, float]]) -> dict[str, float | None]:
    """Mean, median and P90 of the relative error."""
    errors = [
        abs(predicted / elapsed - 1.0) for predicted, elapsed in pairs if elapsed > 0 and math.isfinite(predicted)
    ]
    cuts = percentiles(errors)
    return {name: cuts[name] for name in ("mean", "p50", "p90")}
