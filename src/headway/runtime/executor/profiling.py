"""Latency profile of a model on this host and layout, the checks that a layout fits the host, and its CUDA devices.

Three families are measured separately: attention of a chunk over a history (all layers, through the backend), attention
of a group of decodes, and the rest of a forward pass by its rows. Every point is the fastest of a few visits, in rounds
over all points. The whole grid costs up to `budget_s`; points that would not fit are left out, and the table's last
slope goes on from there.

usage: python -m headway.runtime.executor.profiling prints the CUDA devices as JSON, for a process without torch.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from headway.core.errors import ConfigError
from headway.perf.device import CudaReport, gib
from headway.perf.hardware import ParallelLayout
from headway.perf.latency.table import TableSource, fit_decodes, fit_line
from headway.runtime.executor.plans import places
from headway.runtime.model.config import WHOLE, DecoderConfig, ModelShard, divides


class ProfileGrid(NamedTuple):
    """Points to measure, each list ascending, in tokens."""

    rows: tuple[int, ...]
    """Rows of a forward pass."""
    chunks: tuple[int, ...]
    """Chunk sizes."""
    pasts: tuple[int, ...]
    """History before a chunk."""
    decodes: tuple[tuple[int, int], ...]
    """Decode groups: (requests, past of each)."""
    exchanged: tuple[int, ...]
    """Rows that KV groups exchange."""
    repeats: int
    """Visits of each point, of which the fastest counts."""


QUICK = ProfileGrid((1, 16, 64, 256, 1024), (8, 32, 128, 512), (0, 2048, 8192), ((1, 128), (4, 1024)), (1, 16, 128), 3)
FULL = ProfileGrid(
    (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096),
    (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 2048),
    (0, 1024, 4096, 16384, 65536),
    ((1, 128), (1, 4096), (4, 1024), (16, 256), (16, 1024), (64, 256)),
    (1, 4, 16, 64, 256),
    5,
)


_LONG_SHARE = 0.02
"""Skip a measurement that would take more than this share of the time budget."""


class MeasureFunction(Protocol):
    """Returns the seconds of `kind` (`runtime.executor.measure`): the least of `repeats` runs, on the slowest rank."""

    def __call__(self, kind: str, first: int, second: int, repeats: int) -> float: ...


def profile(
    ask: MeasureFunction,
    slots: int,
    grid: ProfileGrid,
    budget_s: float,
    fingerprint: str,
    provenance: str,
    groups: int = 1,
) -> TableSource:
    """Measure all points and fit the tables.

    There must be no requests: the pool of `slots` tokens of each of the KV `groups` is used as scratch.
    """
    points = _MeasuredPoints(ask, budget_s)
    # Chunks get the first 45% of the budget, decodes up to 60%, forward passes the rest.
    _chunk_points(points, grid, slots)
    for n, past in grid.decodes:
        if n * (past + 1) <= slots and (len(points.of("decodes")) < 2 or points.used < 0.6):
            points.measure("decodes", n, past)
    for rows in grid.rows:
        if rows > slots or (len(points.of("forward")) >= 2 and points.used > 1.0):
            break
        points.measure("forward", rows, 0)
    for _ in range(1, grid.repeats):
        points.measure_again()
    chunks = _chunk_knots(_lowered(points.of("chunk")))
    decodes = [(n, n * (past + 1), seconds) for (n, past), seconds in points.of("decodes").items()]
    rows_s: list[tuple[int, float]] = []
    for (rows, _), seconds in _lowered(points.of("forward")).items():
        # A forward pass includes attention of its own rows, which the chunk table counts: subtract it, but keep at
        # least 20%.
        own = _own_s(rows, chunks) if rows > 1 else 0.0
        rows_s.append((rows, max(seconds - own, 0.2 * seconds)))
    # An iteration without rows is not measurable: half of that of the smallest measured one stands for the fixed part.
    fixed = max(0.0, rows_s[0][1] * 0.5)
    return TableSource(
        fingerprint=fingerprint,
        provenance=provenance,
        tokens=((0, fixed), *rows_s),
        chunks=((0, 0.0, 0.0), *chunks),
        decode=fit_decodes(decodes),
        exchange=exchange(ask, slots, grid) if groups > 1 else None,
        validated_past=max(past for _, past in points.of("chunk")),
    )


PointSeconds = dict[tuple[int, int], float]
"""Seconds by (first, second) of `MeasureFunction`."""


class _MeasuredPoints:
    """The least time of each point, in seconds, over visits that lie apart: other load on a host comes in bursts, which
    take all runs of a point that is measured only once."""

    def __init__(self, ask: MeasureFunction, budget_s: float) -> None:
        self.budget_s = budget_s
        self._ask = ask
        self._seconds: dict[str, PointSeconds] = {}
        self._started = time.perf_counter()

    @property
    def used(self) -> float:
        """Share of the budget that is spent."""
        return (time.perf_counter() - self._started) / self.budget_s

    def of(self, kind: str) -> PointSeconds:
        """Return the points of one kind, in the order of their first visits."""
        return self._seconds.setdefault(kind, {})

    def measure(self, kind: str, first: int, second: int) -> float:
        """Visit a point: a run to warm up and one that counts."""
        seconds = self._ask(kind, first, second, 1)
        known = self.of(kind)
        known[first, second] = min(seconds, known.get((first, second), seconds))
        return seconds

    def measure_again(self) -> None:
        """Visit every point once more, except those that would not end within the budget."""
        for kind, known in self._seconds.items():
            for (first, second), seconds in list(known.items()):
                if self.used + 2 * seconds / self.budget_s < 1.0:
                    self.measure(kind, first, second)


def _chunk_points(points: _MeasuredPoints, grid: ProfileGrid, slots: int) -> None:
    """Visit the chunks: each size without history and over the first, then deeper while a run stays short."""
    for number, size in enumerate(grid.chunks):
        expected_s = 0.0
        pasts = [past for past in grid.pasts if past + size <= slots]
        for place, past in enumerate(pasts):
            # What a chunk takes is a line in its history: of long ones the far end is not needed.
            if place >= 2 and (points.used > 0.45 or expected_s > _LONG_SHARE * points.budget_s):
                break
            seconds = points.measure("chunk", size, past)
            expected_s = seconds * (pasts[min(place + 1, len(pasts) - 1)] + size) / (past + size)
        if not pasts or (points.used > 0.45 and number >= 1):
            return


def _chunk_knots(seconds: PointSeconds) -> list[tuple[int, float, float]]:
    """Return (chunk tokens, seconds without history, seconds per cached token), ascending.

    A row of a chunk costs no more history than one of a chunk of a quarter of the size: where it does, other load on
    the host took all visits of the larger one. (In between, rows that fill no vector may cost more.)
    """
    lines: dict[int, list[tuple[int, float]]] = {}
    for (size, past), each in seconds.items():
        lines.setdefault(size, []).append((past, each))
    knots: list[tuple[int, float, float]] = []
    for size, line in lines.items():
        own_s, past_s = fit_line(line)
        bounds = [size / smaller * slope for smaller, _, slope in knots if 4 * smaller <= size]
        knots.append((size, own_s, min(past_s, *bounds) if bounds else past_s))
    return knots


def _own_s(rows: int, chunks: Sequence[tuple[int, float, float]]) -> float:
    """Return the attention of a chunk within itself, as `TableLatency` has it."""
    size, own, per_past = chunks[-1]
    if rows > size:
        # Pieces of the longest measured chunk, each over those before it.
        return max(0.0, rows / size * (own + per_past * (rows - size) / 2.0))
    return float(np.interp(rows, [c for c, _, _ in chunks], [a for _, a, _ in chunks]))


def _lowered(seconds: PointSeconds) -> PointSeconds:
    """Return the points with none above one of more tokens: less work takes no more time, so that it was disturbed."""
    return {
        (first, second): min(s for (more, beyond), s in seconds.items() if more >= first and beyond >= second)
        for first, second in seconds
    }


def exchange(ask: MeasureFunction, slots: int, grid: ProfileGrid) -> tuple[float, float]:
    """Return (s an iteration, s a row and remote group) of `perf.latency.groups.Exchange`, over the live links.

    Takes some tenths of a second.
    """
    points: list[tuple[int, float]] = []
    for rows in sorted(grid.exchanged, reverse=True):
        if rows <= slots:
            seconds = ask("exchange", rows, 0, 4 * grid.repeats)
            # More rows never take less time: a point above a later (larger) one was disturbed, and is lowered to it.
            # Two processes have to run at the same moment, so more runs are disturbed than elsewhere.
            points.append((rows, min(seconds, points[-1][1]) if points else seconds))
    points = [(rows, seconds) for rows, seconds in reversed(points) if seconds > 0.0]
    return fit_line(points) if points else (0.0, 0.0)


# Checks, before anything is started, that a model fits a layout and that a layout fits this host. No torch.

WORKER_BYTES = 160 << 20
"""Memory of a worker process besides weights and KV: its libraries' private memory (measured, PSS)."""


class MemoryNeed(NamedTuple):
    """Bytes of all ranks together."""

    weights: int
    kv_per_token: int
    """Keys and values of one token, which lies in one KV group."""
    processes: int
    """See `WORKER_BYTES`."""


def need(config: DecoderConfig, layout: ParallelLayout, itemsize: int) -> MemoryNeed:
    """Return the memory that a layout takes. itemsize: bytes of a weight and of a number in the cache."""
    shards = [place.shard for place in places(layout)]
    weights = sum(numbers(config, shard) for shard in shards) * itemsize
    pairs = [len(shard.layers(config)) * len(shard.kv_heads(config)) for shard in shards]
    # A token lies in one of the kvp groups, but `pairs` counts the ranks of all of them. 2: keys and values.
    per_token = sum(pairs) // layout.kvp * 2 * config.head_dim * itemsize
    return MemoryNeed(weights, per_token, WORKER_BYTES * len(shards))


def numbers(config: DecoderConfig, shard: ModelShard) -> int:
    """Return how many weights a rank holds (without norms and biases, which are below 0.1%)."""
    q, kv = (len(heads) * config.head_dim for heads in (shard.q_heads(config), shard.kv_heads(config)))
    # q and out have hidden x q weights each, k and v hidden x kv, gate, up and down hidden x mlp.
    layer = config.hidden_size * (2 * q + 2 * kv + 3 * len(shard.mlp(config)))
    words = len(shard.vocabulary(config)) * config.hidden_size
    return len(shard.layers(config)) * layer + (shard.first + shard.last) * words


def parameters(config: DecoderConfig) -> int:
    """Return how many weights a process with the whole model holds: norms and biases too, a tied head twice."""
    q, kv = config.q_heads * config.head_dim, config.kv_heads * config.head_dim
    norms = 2 * config.hidden_size + 2 * config.head_dim * config.qk_norm
    biases = (q + 2 * kv) * config.qkv_bias + config.hidden_size * config.out_bias
    biases += (2 * config.mlp_size + config.hidden_size) * config.mlp_bias
    return numbers(config, WHOLE) + config.layers * (norms + biases) + config.hidden_size


def check_shape(config: DecoderConfig, layout: ParallelLayout) -> None:
    """Raise ConfigError, with the numbers and the nearest layouts that can be, when the model cannot be cut so."""
    problem = None
    if not divides(config, layout.tp):
        problem = (
            f"{config.q_heads} query heads and {config.kv_heads} KV heads cannot be cut evenly over "
            f"--tensor-parallel-size {layout.tp}"
        )
    elif layout.stages > config.layers:
        problem = f"{config.layers} layers cannot make --pipeline-parallel-size {layout.stages} stages"
    if problem is not None:
        raise ConfigError(f"{problem}: {_nearest(config, layout, 'can be', lambda other: True)}")


def check_memory(
    config: DecoderConfig, layout: ParallelLayout, itemsize: int, available: int, kv_bytes: int | None, tokens: int
) -> None:
    """Raise ConfigError when the layout does not fit the memory.

    That is when weights, and the cache of one request of `tokens` tokens, exceed `available`, the bytes for all ranks
    of this host, or when that request exceeds `kv_bytes`, the bytes reserved for the caches of all KV groups together:
    a long request lies in all of them.
    """

    def takes(other: ParallelLayout) -> tuple[MemoryNeed, int]:
        wanted = need(config, other, itemsize)
        cache = wanted.kv_per_token * tokens
        return wanted, wanted.weights + wanted.processes + max(cache, kv_bytes or 0)

    wanted, total = takes(layout)
    cache = wanted.kv_per_token * tokens
    if kv_bytes is not None and cache > kv_bytes:
        over = f"{layout.kvp} groups of " if layout.kvp > 1 else ""
        raise ConfigError(
            f"one request of {tokens} tokens needs {gib(cache)} of KV cache ({wanted.kv_per_token} bytes a token over "
            f"{over}{layout.tp * layout.stages} workers) and --kv-cache-memory gives {gib(kv_bytes)}: give it more or "
            "lower --max-model-len"
        )
    if total > available:
        raise ConfigError(
            f"{layout.name} needs {gib(total)}: {gib(wanted.weights)} of weights, {gib(wanted.processes)} for "
            f"{layout.accelerators} processes and {gib(max(cache, kv_bytes or 0))} of KV cache (one request of "
            f"{tokens} tokens takes {gib(cache)}); {gib(available)} is available. Lower --max-model-len or "
            "--kv-cache-memory; " + _nearest(config, layout, "fit", lambda other: takes(other)[1] <= available)
        )


def _nearest(config: DecoderConfig, asked: ParallelLayout, do: str, fits: Callable[[ParallelLayout], bool]) -> str:
    """Return the phrase "nearest that `do` …" with the possible and fitting layouts that are closest to `asked`."""
    candidates = [
        ParallelLayout(tp=tp, stages=stages, kvp=kvp)
        for tp in range(1, 2 * asked.tp + 1)
        for stages in range(1, min(2 * asked.stages, config.layers) + 1)
        for kvp in range(1, asked.kvp + 1)
        if divides(config, tp)
    ]
    candidates.sort(key=lambda other: _distance(asked, other))
    near = [other for other in candidates if other != asked and fits(other)][:3]
    if not near:
        return "no layout of this model fits"
    words = [f"{o.tp} x {o.stages} x {o.kvp}" for o in near]
    return f"nearest that {do} (tensor x pipeline x KV parallel size): {', '.join(words)}"


def _distance(asked: ParallelLayout, other: ParallelLayout) -> tuple[int, int, int]:
    steps = abs(asked.tp - other.tp) + abs(asked.stages - other.stages) + abs(asked.kvp - other.kvp)
    return (steps, abs(asked.accelerators - other.accelerators), -other.tp)


# The CUDA devices that torch finds, in this process or, to keep torch out of it, in a separate one.


def look() -> CudaReport:
    """Return the CUDA devices, by importing torch and opening each device in this process."""
    import torch

    version = str(torch.__version__)
    if not torch.cuda.is_available():
        return CudaReport(version, torch.version.cuda is not None)
    devices = range(torch.cuda.device_count())
    names = tuple(torch.cuda.get_device_name(device) for device in devices)
    return CudaReport(version, True, names, tuple(torch.cuda.mem_get_info(device)[0] for device in devices))


def look_apart() -> CudaReport:
    """Return the CUDA devices as found by another process, which has ended when this returns. Raises ConfigError."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "headway.runtime.executor.profiling"],
        capture_output=True,
        stdin=subprocess.DEVNULL,
    )
    try:
        return msgspec.json.decode(done.stdout, type=CudaReport)
    except msgspec.MsgspecError as error:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise ConfigError(f"torch cannot be asked for CUDA devices: {lines[-1] if lines else error}") from error


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(look()))
