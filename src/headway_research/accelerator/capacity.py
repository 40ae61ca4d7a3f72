"""Capacity of an accelerator: the most requests a second within latency limits, by the live scheduler in virtual time.

The limits are the paper's (§V, case study 3): the 99th percentile of all gaps between tokens, and of the delay from
arrival to being scheduled first. A rate is judged by one simulation of the same requests, their arrivals stretched; the
capacity is found between a rate that holds and one that does not, to a ratio.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from headway.core.errors import ConfigError
from headway.perf.accelerator.attention import kv_bytes
from headway.perf.accelerator.iteration_work import IterationWork
from headway.perf.accelerator.operators import OperatorSetting
from headway.perf.accelerator.serving import AcceleratorLatency
from headway.perf.accelerator.stage import simulate_stage
from headway.perf.accelerator.timeline import Mode
from headway.perf.hardware.utilisation import UtilisationBase
from headway.perf.latency.base import BatchLoad, load_s, one_chunk_s
from headway.policy.iteration.chunking_strategies import make_chunking
from headway.policy.iteration.config import SchedulerConfig
from headway.sim import InstanceSpec, RunSpec, simulate
from headway.sim.metrics import RequestRecord
from headway.sim.result import SimResult
from headway.sim.workload import TraceRequest

STEP = 1.2
Draw = Callable[[float], list[TraceRequest]]
"""Function from a rate to requests: always the same ones, with scaled arrival times."""


@dataclass(frozen=True, kw_only=True)
class ServiceLimits:
    """Latency limits of a capacity search."""

    tbt_s: float | None
    """Limit of gaps between tokens; None: no limit (the throughput at which delays saturate)."""
    delay_s: float = 1.0
    """Limit of seconds from arrival to first scheduling."""
    percentile: float = 99.0
    """Percentile that the limits apply to."""


@dataclass(frozen=True, kw_only=True)
class RateResult:
    """Result of one simulated rate."""

    qps: float
    tbt_s: float
    """Gap between tokens at the limits' percentile."""
    delay_s: float
    """Delay at the limits' percentile."""
    finished: int
    requests: int
    ok: bool
    """All limits hold and every request finished."""

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("qps", "tbt_s", "delay_s", "finished", "requests", "ok")}


@dataclass(frozen=True, kw_only=True)
class CapacityResult:
    """Result of a capacity search."""

    qps: float
    """Highest rate found within the limits; 0.0: none down to the lowest tried."""
    tried: tuple[RateResult, ...] = field(default=())
    """Every simulated rate, ascending."""


def sarathi(chunk: int, most: int = 128) -> SchedulerConfig:
    """Return the paper's serving policy, Sarathi-Serve's.

    Decodes first, then the oldest prompts fill a budget of `chunk` tokens (decodes count), at most `most` requests at
    once; prompt length has no influence."""
    return SchedulerConfig(
        policy="fcfs",
        chunking=f"static:{chunk}",
        max_num_seqs=most,
        max_num_batched_tokens=max(chunk, 8192),
        long_tokens=1 << 40,
        long_iterations=0.0,
        kv_headroom=0.0,
        least_gain=0.0,
        stretch=0.0,
    )


def kv_capacity(setting: OperatorSetting) -> int:
    """Return the KV tokens that fit HBM besides the weights. Raises ConfigError where the weights do not fit."""
    report = simulate_stage(setting, IterationWork(prefill_tokens=1))
    per_token = setting.shape.layers * kv_bytes(setting.shape, setting.precision)
    left = setting.machine.capacity - (report.memory_bytes - per_token)
    if left < per_token:
        raise ConfigError(
            f"machine.hbm_capacity: {setting.machine.capacity / 1e9:.1f} GB cannot hold the model's "
            f"{(report.memory_bytes - per_token) / 1e9:.1f} GB of weights and any KV"
        )
    return int(left / per_token)


def instance(setting: OperatorSetting, mode: Mode, config: SchedulerConfig, kv_tokens: int) -> InstanceSpec:
    """Return a simulated instance with the accelerator's timeline as its latency model."""
    shape, machine = setting.model, setting.machine
    return InstanceSpec(
        config=config,
        latency=AcceleratorLatency(setting, mode),
        kv_tokens=kv_tokens,
        utilisation_base=UtilisationBase(shape=shape, peak_flops=machine.flops, peak_bandwidth=machine.bandwidth),
    )


def gaps_s(records: Sequence[RequestRecord]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return all gaps between consecutive tokens of all requests, in seconds."""
    parts = [np.diff(np.asarray(record.token_s)) for record in records if len(record.token_s) > 1]
    return np.concatenate(parts) if parts else np.zeros(0)


def judged(result: SimResult, qps: float, limits: ServiceLimits) -> RateResult:
    """Compare a simulation at rate `qps` with the limits."""
    gaps = gaps_s(result.records)
    delays = np.array([r.scheduled_s - r.arrival_s for r in result.records if r.scheduled_s is not None])
    tbt_s = float(np.percentile(gaps, limits.percentile)) if gaps.size else 0.0
    delay_s = float(np.percentile(delays, limits.percentile)) if delays.size else float("inf")
    finished = sum(record.ok for record in result.records)
    ok = delay_s <= limits.delay_s and finished == len(result.records)
    return RateResult(
        qps=qps,
        tbt_s=tbt_s,
        delay_s=delay_s,
        finished=finished,
        requests=len(result.records),
        ok=ok and (limits.tbt_s is None or tbt_s <= limits.tbt_s * (1 + 1e-9)),
    )


def rate_of(spec: InstanceSpec, draw: Draw, limits: ServiceLimits, qps: float) -> RateResult:
    """Simulate one rate and compare it with the limits."""
    return judged(simulate(spec, draw(qps), RunSpec(send_slo=False)), qps, limits)


def expected_qps(spec: InstanceSpec, requests: Sequence[TraceRequest]) -> float:
    """About how many requests a second saturate an instance: full iterations of mean requests. A place to start."""
    prompt = float(np.mean([request.prompt_tokens for request in requests]))
    output = float(np.mean([request.output_tokens for request in requests]))
    config = spec.config
    budget = make_chunking(config.chunking).most or config.max_num_batched_tokens
    decodes, held = 1, prompt + output / 2
    qps = 0.0
    for _ in range(20):
        load = BatchLoad(decodes, decodes, int(min(decodes * held, spec.kv_tokens)))
        rows = max(budget - decodes, 1)
        past = int(prompt / 2)
        load = load.with_chunk(rows, one_chunk_s(spec.latency, past, rows), past)
        seconds = load_s(spec.latency, load)
        qps = rows / seconds / prompt
        wanted = min(qps * output * seconds, config.max_num_seqs, spec.kv_tokens / held)
        decodes = max(1, round((decodes + wanted) / 2))
    return qps


def capacity(
    spec: InstanceSpec,
    draw: Draw,
    limits: ServiceLimits,
    *,
    start: float | None = None,
    ratio: float = 1.02,
    lowest: float = 1 / 64,
) -> CapacityResult:
    """Return the highest rate within the limits, to a factor of `ratio`.

    Brackets it from `start` (default: three quarters of the expected saturation) in growing steps up or down, then
    interpolates, assuming that times grow with a constant power of the rate. Raises ConfigError when no rate exceeds
    the limits."""
    tried: dict[float, RateResult] = {}
    start = start or max(0.75 * expected_qps(spec, draw(1.0)), 2 * lowest)

    def ok(qps: float) -> bool:
        tried[qps] = rate_of(spec, draw, limits, qps)
        return tried[qps].ok

    def found(qps: float) -> CapacityResult:
        return CapacityResult(qps=qps, tried=tuple(tried[at] for at in sorted(tried)))

    low = high = start
    step = STEP
    if ok(start):
        while ok(high := low * step):
            low, step = high, step**2
            if high > start * 2**20:
                raise ConfigError("every rate is within the limits: give longer requests or tighter limits")
    else:
        while not ok(low := high / step):
            high, step = low, step**2
            if low < lowest:
                return found(0.0)
    # Invariant: `low` is within the limits, `high` is not. Probes go just below, then just above the interpolated rate;
    # every third bisects, which bounds the number of steps where the assumption fails.
    turn = 0
    while high / low > ratio:
        share = (_share(tried[low], tried[high], limits), 0.5)[turn % 3 == 2]
        margin = (-0.4, 0.4, 0.0)[turn % 3] * np.log(ratio) / np.log(high / low)
        middle = low * (high / low) ** float(np.clip(share + margin, 0.1, 0.9))
        low, high = (middle, high) if ok(middle) else (low, middle)
        turn += 1
    return found(low)


def _share(low: RateResult, high: RateResult, limits: ServiceLimits) -> float:
    """Return the position (0 to 0.9) between two rates on a log scale at which the first limit is met."""
    # Log time is interpolated linearly over log rate; 0.9 keeps a probe below the rate that failed.
    shares = [0.9]
    for before, after, limit in ((low.tbt_s, high.tbt_s, limits.tbt_s), (low.delay_s, high.delay_s, limits.delay_s)):
        if limit is not None and 0 < before <= limit < after:
            shares.append(float(np.log(limit / before) / np.log(after / before)))
    return min(shares)


def bandwidth_to_match(
    setting: OperatorSetting,
    config: SchedulerConfig,
    kv_tokens: int,
    draw: Draw,
    limits: ServiceLimits,
    qps: float,
    *,
    ratio: float = 1.02,
    most: float = 16.0,
) -> float | None:
    """Return the multiple of the machine's HBM bandwidth at which packing alone serves `qps` within the limits.

    None above `most`."""

    def ok(times: float) -> bool:
        machine = setting.machine.with_(bandwidth=setting.machine.bandwidth * times)
        spec = instance(setting._replace(machine=machine), "packing", config, kv_tokens)
        return rate_of(spec, draw, limits, qps).ok

    low, high = 1.0, 2.0
    if ok(low):
        return low
    while not ok(high):
        low, high = high, high * 2.0
        if high > most:
            return None
    # Geometric bisection; `high` suffices, `low` does not.
    while high / low > ratio:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if ok(middle) else (middle, high)
    return high


def at_rate(requests: Sequence[TraceRequest], qps: float) -> list[TraceRequest]:
    """Return requests drawn at one a second with their arrivals rescaled to `qps`."""
    return [replace(request, arrival_s=request.arrival_s / qps) for request in requests]


__all__ = [
    "CapacityResult",
    "Draw",
    "RateResult",
    "ServiceLimits",
    "at_rate",
    "bandwidth_to_match",
    "capacity",
    "expected_qps",
    "gaps_s",
    "instance",
    "judged",
    "kv_capacity",
    "rate_of",
    "sarathi",
]  # fmt: skip
