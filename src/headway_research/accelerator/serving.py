"""Requests on an accelerator that prefetches KV: a latency model for the scheduler, and capacity within latency limits.

Products are tabulated by row count when the model is made (from the mapping search at knots, linear between them),
attention is closed-form, and a batch is composed as in `stage.run`: `whole_s` equals a stage of `stage` in the model's
mode, and costs microseconds. The separable terms are those of packing without prefetch, an upper bound. Two departures
from a stage: chunks of several prompts in one iteration attend one after the other; whether queries stay on chip is
decided by a chunk's size alone.

The limits are the paper's (§V, case study 3): the 99th percentile of all gaps between tokens, and of the delay from
arrival to being scheduled first. A rate is judged by one simulation of the same requests, their arrivals stretched; the
capacity is found between a rate that holds and one that does not, to a ratio.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np

from headway.core.errors import ConfigError
from headway.perf.latency.base import MAX_CHUNK, BatchLoad, CoupledLatency, Seconds, load_s
from headway.perf.utilisation import UtilisationBase
from headway.policy.iteration.config import ChunkingRule, SchedulerConfig
from headway.sim import InstanceSpec, RunSpec, simulate
from headway.sim.metrics import RequestRecord
from headway.sim.result import SimResult
from headway.sim.workload import TraceRequest
from headway_research.accelerator.machine import IterationWork
from headway_research.accelerator.operators import (
    ChunkNumbers,
    OperatorSetting,
    attending_unit,
    chunk_numbers,
    elementwise_cost,
    fused_of,
    own_cycles,
    products,
    tiles,
)
from headway_research.accelerator.stage import Mode, simulate_stage

MOST_ROWS = MAX_CHUNK + 2048
KNOTS = (
    1, 2, 4, 8, *range(16, 1024, 16), *range(1024, 2048, 64), *range(2048, 8192, 512), *range(8192, MOST_ROWS, 2048),
    MOST_ROWS,
)  # fmt: skip


class AcceleratorLatency(CoupledLatency):
    """`CoupledLatency` of one instance without pipeline stages."""

    def __init__(self, setting: OperatorSetting, mode: Mode) -> None:
        """Tabulate the model. mode: packing or prefetch. Raises ConfigError for serial."""
        if mode == "serial":
            raise ConfigError("mode must be packing or prefetch: a scheduler always packs")
        shape, machine, _, assumed, _ = setting
        self.setting, self.mode = setting, mode
        self._layers = shape.layers
        self._bandwidth = machine.bandwidth
        buffer = float(machine.prefetch_bytes) if mode == "prefetch" else 0.0
        self._most_ahead = max(buffer, float(assumed.ahead_bytes))
        self._kv_bytes = setting.kv_bytes
        # From a long context, where all tiles but the last are full.
        self._kv_s = attending_unit(setting, 1 << 20)[1] / (1 << 20)
        self._decode_rows = assumed.decode_rows
        self._written = self._kv_bytes if assumed.decode_kv_written else 0.0
        self._in_attention, self._cold = assumed.prefetch_in_attention, not assumed.across_iterations
        self._tabulate()

    # -- LatencyModel -----------------------------------------------------------------------------------------------

    def token_s(self, first: int, last: int) -> Seconds:
        """Return the seconds of all layers' products, and of the LM head for one row."""
        if last < self._rows_s.size:
            return self._rows_s[first : last + 1]
        rows = np.arange(first, last + 1, dtype=np.float64)
        # Beyond the table: the mean slope of its last 1,024 rows.
        slope = float(self._rows_s[-1] - self._rows_s[-1025]) / 1024.0
        inside = np.minimum(rows, self._rows_s.size - 1).astype(np.int64)
        return np.asarray(self._rows_s[inside] + slope * (rows - inside), dtype=np.float64)

    def chunk_s(self, past: int, first: int, last: int) -> Seconds:
        """Return the seconds of a chunk's attention over all layers."""
        if first == last < len(self._one):
            return np.array([self._one_s(past, first)])
        if last < self._own.size:
            tokens, own, fused = (table[first : last + 1] for table in (self._tokens, self._own, self._chunk_fused))
        else:
            tokens = np.arange(first, last + 1, dtype=np.float64)
            # Beyond MAX_CHUNK a chunk's attention within itself grows with the square; its queries are not on chip.
            own, fused = self._own[-1] * (tokens / (self._own.size - 1)) ** 2, np.zeros(tokens.size, dtype=bool)
        found = self._numbers(tokens, past, own, fused)
        return np.asarray(np.where(tokens > 0, found.seconds(self._bandwidth) * self._layers, 0.0), dtype=np.float64)

    def _one_s(self, past: int, tokens: int) -> float:
        """Return `chunk_s` of one size from the lines of `_lines`, in about a microsecond."""
        own_s, by_unit_s, softmax_s, softmax_by_past, moved, by_past, most_fill = self._one[tokens]
        units = tiles(self.setting, past) if self.setting.assumed.mapper else past
        moved += by_past * past
        fill = min(moved, most_fill)
        busy_s = max(own_s + by_unit_s * units, softmax_s + softmax_by_past * past)
        return self._layers * (fill / self._bandwidth + max(busy_s, (moved - fill) / self._bandwidth))

    def decode_s(self, decodes: int, kv_sum: int) -> float:
        """Return the seconds of decode attention without any KV prefetched: an upper bound."""
        return self._layers * max(kv_sum * self._kv_s, kv_sum * self._kv_bytes / self._bandwidth)

    def observe(self, load: BatchLoad, measured_s: float) -> None:
        """Ignore the measurement: this model does not learn."""

    # -- CoupledLatency ---------------------------------------------------------------------------------------------

    def whole_s(self, load: BatchLoad) -> float:
        """Return the seconds of a whole iteration, with KV prefetched as in `timeline.run`."""
        chunk = load.tokens - load.decodes
        decodes = load.decodes
        rows = chunk + (0 if not decodes else decodes if self._decode_rows is None else self._decode_rows)
        bandwidth, layers = self._bandwidth, self._layers
        if rows < self._most:
            products_s, idle, own_idle = self._products_s[rows], self._idle[rows], self._own_idle[rows]
        else:
            products_s = (self.rows_s(rows) - self._head_s) / layers
            idle, own_idle = self._idle[-1], self._own_idle[-1]
        seconds = layers * products_s + load.chunk_s + self._head_s
        if not decodes:
            return seconds
        moved = load.decode_kv * self._kv_bytes
        compute_s = load.decode_kv * self._kv_s
        # KV bytes that may be on chip before decode attention: the buffer's, at most one layer's.
        most = min(self._most_ahead, moved)
        hidden = first = 0.0
        if most:
            # New KV of decodes is written during the products and shortens HBM's idle time.
            written = decodes * self._written
            gap = self._chunk_idle(chunk, load) if chunk and self._in_attention else 0.0
            hidden = min(most, max(0.0, idle - written) + gap)
            first = min(most, max(0.0, own_idle - written) + gap) if self._cold else hidden
        return (
            seconds
            + (layers - 1) * max(compute_s, (moved - hidden) / bandwidth)
            + max(compute_s, (moved - first) / bandwidth)
        )

    def _chunk_idle(self, chunk: int, load: BatchLoad) -> float:
        """Return the bytes that HBM could move besides during one layer's prefill attention."""
        at = min(chunk, self._own.size - 1)
        moved = self._chunk_moved[at] + self._chunk_by_past[at] * load.chunk_past
        return max(0.0, load.chunk_s / self._layers * self._bandwidth - moved)

    # -- tables -----------------------------------------------------------------------------------------------------

    def _tabulate(self) -> None:
        setting, bandwidth, assumed = self.setting, self._bandwidth, self.setting.assumed
        fused = [fused_of(setting, rows) for rows in KNOTS]
        costs = products(setting, KNOTS, [1] * len(KNOTS), fused)
        seconds, idle, own_idle = [], [], []
        for i, rows in enumerate(KNOTS):
            qkv, *after = costs[5 * i : 5 * i + 4]
            before = [qkv] + ([elementwise_cost(setting, rows)] if assumed.elementwise_ops else [])
            seconds.append(sum(op.seconds(bandwidth) for op in (*before, *after)))
            own_idle.append(sum(op.idle_bytes(bandwidth) for op in before))
            idle.append(own_idle[-1] + sum(op.idle_bytes(bandwidth) for op in after))
        grid = np.arange(MOST_ROWS + 1, dtype=np.float64)
        dense = [np.interp(grid, (0, *KNOTS), (0.0, *values)) for values in (seconds, idle, own_idle)]
        self._head_s: float = costs[4].seconds(bandwidth) if assumed.lm_head else 0.0
        self._rows_s = np.asarray(dense[0] * self._layers + np.where(grid > 0, self._head_s, 0.0), dtype=np.float64)
        lists: list[list[float]] = [values.tolist() for values in dense]
        self._products_s, self._idle, self._own_idle = lists
        self._most = len(self._products_s)
        self._tokens = np.arange(MAX_CHUNK + 1, dtype=np.float64)
        self._own = _own_table(setting) if assumed.mapper else np.zeros(MAX_CHUNK + 1)
        # Chunks whose queries stay on chip: all up to the largest knot at which they fit.
        kept = [f.attention for f in fused]
        upto = max((rows for rows, keeps in zip(KNOTS, kept, strict=True) if keeps), default=0)
        self._chunk_fused = self._tokens <= upto
        found = self._numbers(self._tokens, 0, self._own, self._chunk_fused)
        self._chunk_moved: list[float] = np.asarray(found.moved).tolist()
        self._chunk_by_past: list[float] = np.broadcast_to(np.asarray(found.moved_by_past), self._tokens.shape).tolist()
        self._one = self._lines(found)

    def _lines(self, alone: ChunkNumbers) -> list[tuple[float, ...]]:
        """Return, by chunk size, attention's cost alone and per cached token (or tile of them).

        Empty without flash attention: scores that spill to HBM are not linear in the past."""
        setting = self.setting
        if not setting.techniques.flash_attention:
            return []
        far = 1 << 20
        units = tiles(setting, far) if setting.assumed.mapper else far
        over = self._numbers(self._tokens, far, self._own, self._chunk_fused)
        double = setting.techniques.double_buffering
        columns = (
            alone.array_s,
            (over.array_s - alone.array_s) / units,
            alone.softmax_s,
            (over.softmax_s - alone.softmax_s) / far,
            alone.moved,
            alone.moved_by_past,
            over.fill if double else np.inf,
        )
        lists = [np.broadcast_to(np.asarray(c, dtype=np.float64), self._tokens.shape).tolist() for c in columns]
        return [(0.0,) * 7, *list(zip(*lists, strict=True))[1:]]

    def _numbers(self, tokens: Any, past: int, own: Any, fused: Any) -> ChunkNumbers:
        return chunk_numbers(self.setting, tokens, past, own, fused)


@cache
def _own_table(setting: OperatorSetting) -> Seconds:
    """Return `own_cycles` of every chunk up to MAX_CHUNK."""
    return np.array([0.0] + [own_cycles(setting, tokens) for tokens in range(1, MAX_CHUNK + 1)])


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
    )


def kv_capacity(setting: OperatorSetting) -> int:
    """Return the KV tokens that fit HBM besides the weights. Raises ConfigError where the weights do not fit."""
    report = simulate_stage(setting, IterationWork(prefill_tokens=1))
    per_token = setting.shape.layers * setting.kv_bytes
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
    budget = ChunkingRule.read(config.chunking).most or config.max_num_batched_tokens
    decodes, held = 1, prompt + output / 2
    qps = 0.0
    for _ in range(20):
        load = BatchLoad(decodes, decodes, int(min(decodes * held, spec.kv_tokens)))
        rows = max(budget - decodes, 1)
        past = int(prompt / 2)
        load = load.with_chunk(rows, spec.latency.attention_s(past, rows), past)
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
