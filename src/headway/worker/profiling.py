"""How long this model takes on this machine, by measuring the live code: what `headway profile` runs.

Three families, each measured where it stands alone: attention of a chunk over a history (all layers, through the
backend), attention of a group of decodes, and the rest of a forward pass by its rows. Every point is the fastest of a
few runs. The whole grid costs up to `budget_s`; points that would not fit are left out, and the table's last slope
goes on from there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from headway.attention.base import Segment
from headway.latency.tables import TableSource
from headway.worker.worker import Worker


class Grid(NamedTuple):
    """Which points are measured, ascending: rows of a forward pass, chunk sizes, pasts, decode groups (n, past)."""

    rows: tuple[int, ...]
    chunks: tuple[int, ...]
    pasts: tuple[int, ...]
    decodes: tuple[tuple[int, int], ...]
    repeats: int


QUICK = Grid((1, 16, 64, 256), (8, 32, 128), (0, 2048), ((1, 128), (4, 1024)), 3)
FULL = Grid(
    (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096),
    (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 2048),
    (0, 1024, 4096, 16384, 65536),
    ((1, 128), (1, 4096), (4, 1024), (16, 256), (16, 1024), (64, 256)),
    5,
)


def profile(worker: Worker, grid: Grid, budget_s: float, fingerprint: str, provenance: str) -> TableSource:
    """Measure and compile. The worker must hold no requests: its pool is used as scratch (values are irrelevant)."""
    deadline = time.perf_counter() + budget_s
    slots = worker.pool.slots
    measure = _Measure(worker, grid.repeats)
    chunks = []
    longest = 0
    share = deadline - 0.55 * budget_s
    for c in grid.chunks:
        points: list[tuple[int, float]] = []
        for past in grid.pasts:
            if past + c > slots or (len(points) >= 2 and time.perf_counter() > share):
                break
            points.append((past, measure.chunk(c, past)))
            longest = max(longest, past)
        if not points:
            break
        a, b = _line(points)
        chunks.append((c, a, b))
        if time.perf_counter() > share and len(chunks) >= 2:
            break
    decodes: list[tuple[int, int, float]] = []
    for n, past in grid.decodes:
        if n * (past + 1) <= slots and (len(decodes) < 2 or time.perf_counter() < deadline - 0.4 * budget_s):
            decodes.append((n, n * (past + 1), measure.decodes(n, past)))
    rows: list[tuple[int, float]] = []
    for t in grid.rows:
        if t > slots or (len(rows) >= 2 and time.perf_counter() > deadline):
            break
        seconds = measure.forward(t)
        own = float(np.interp(t, [c for c, _, _ in chunks], [a for _, a, _ in chunks])) if t > 1 else 0.0
        rows.append((t, max(seconds - own, 0.2 * seconds)))
    fixed = max(0.0, rows[0][1] * 0.5)
    return TableSource(
        fingerprint=fingerprint,
        provenance=provenance,
        tokens=((0, fixed), *rows),
        chunks=((0, 0.0, 0.0), *chunks),
        decode=_decode_fit(decodes),
        validated_past=longest,
    )


class _Measure:
    def __init__(self, worker: Worker, repeats: int) -> None:
        self.worker = worker
        self.repeats = repeats
        config = worker.decoder.config
        self._shape = (config.q_heads, config.kv_heads, config.head_dim)

    def _seconds(self, run: Callable[[], object]) -> float:
        """The fastest of a few runs: whatever else the machine does can only add."""
        run()
        times = []
        for _ in range(self.repeats):
            started = time.perf_counter()
            run()
            times.append(time.perf_counter() - started)
            if times[-1] > 0.5:
                break
        return min(times)

    def _attention(self, segments: list[Segment], rows: int) -> Callable[[], None]:
        decoder, pool = self.worker.decoder, self.worker.pool
        q_heads, kv_heads, dim = self._shape
        qkv = torch.randn(rows, q_heads + 2 * kv_heads, dim).to(decoder.dtype)
        q, k, v = qkv[:, :q_heads], qkv[:, q_heads : q_heads + kv_heads], qkv[:, q_heads + kv_heads :]

        def run() -> None:
            with torch.inference_mode():
                plan = decoder.backend.plan(segments, pool)
                for layer in range(pool.layers):
                    decoder.backend.run(layer, q, k, v, plan)

        return run

    def chunk(self, tokens: int, past: int) -> float:
        """Seconds of one chunk's attention. A one-token chunk is measured like any other."""
        return self._seconds(self._attention([Segment(0, tokens, past, ((0, past + tokens),))], tokens))

    def decodes(self, n: int, past: int) -> float:
        segments = [Segment(i, 1, past, ((i * (past + 1), past + 1),)) for i in range(n)]
        return self._seconds(self._attention(segments, n))

    def forward(self, rows: int) -> float:
        """Seconds of a whole forward pass of one chunk without history, one row through the LM head."""
        decoder, pool = self.worker.decoder, self.worker.pool
        tokens = torch.arange(rows) % decoder.config.vocab_size
        positions = torch.arange(rows)
        last = torch.tensor([rows - 1])

        def run() -> None:
            plan = decoder.backend.plan([Segment(0, rows, 0, ((0, rows),))], pool)
            decoder.forward(tokens, positions, plan, last)

        return self._seconds(run)


def _line(points: list[tuple[int, float]]) -> tuple[float, float]:
    """a + b * past with relative weights, both not below 0."""
    if len(points) == 1:
        return points[0][1], 0.0
    past = np.array([p for p, _ in points], dtype=np.float64)
    seconds = np.array([s for _, s in points])
    design = np.stack([np.ones_like(past), past], axis=1) / seconds[:, None]
    (a, b), *_ = np.linalg.lstsq(design, np.ones_like(seconds), rcond=None)
    if a < 0 or b < 0:
        a, b = float(seconds[0]), max(0.0, float((seconds[-1] - seconds[0]) / max(past[-1] - past[0], 1.0)))
    return float(a), float(b)


def _decode_fit(points: list[tuple[int, int, float]]) -> tuple[float, float, float]:
    """(fixed, per request, per KV token) with relative weights; terms that come out negative are dropped."""
    if not points:
        return 0.0, 0.0, 0.0
    n = np.array([p[0] for p in points], dtype=np.float64)
    kv = np.array([p[1] for p in points], dtype=np.float64)
    seconds = np.array([p[2] for p in points])
    columns = np.stack([np.ones_like(n), n, kv], axis=1) / seconds[:, None]
    active = [1, 2] if len(points) < 4 else [0, 1, 2]
    while active:
        solution, *_ = np.linalg.lstsq(columns[:, active], np.ones_like(seconds), rcond=None)
        if (solution >= 0).all():
            terms = dict(zip(active, (float(x) for x in solution), strict=True))
            return terms.get(0, 0.0), terms.get(1, 0.0), terms.get(2, 0.0)
        active.pop(int(np.argmin(solution)))
    return 0.0, float(np.median(seconds / n)), 0.0
