"""Measurements of single operators of a rank's live code, and the choice of threads and cores that compute.

The worker must hold no requests: its pool is used as scratch (values are irrelevant). A forward pass sums over the
tensor-parallel ranks, so all ranks must run the same measurement at the same time.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import torch

from headway.core.errors import InvariantError
from headway.core.machine import CORES, shares
from headway.runtime.attention.backend import AttentionPlan, BatchSegment
from headway.runtime.executor.worker import GroupAttention, ModelWorker, RemoteQuery, RemoteRows


def measure(worker: ModelWorker, kind: str, first: int, second: int, repeats: int) -> float:
    """Return the seconds of the fastest of `repeats` runs: other load on the host can only add time.

    kind: "chunk", the attention of `first` tokens over `second` past ones; "decodes", of `first` requests with `second`
    past tokens each; "forward", a chunk of `first` tokens without history through the layers, one row to the LM head.
    "ask": the time added to the attention of `first` rows when KV group `second` attends them as well, over one token;
    the rank in the same place of that group must run "visit" at the same time, which returns 0. "product": two square
    matrices of `first` rows; "read": a matrix of `first` MiB times a vector: what the device can at best.
    """
    if kind == "product":
        # Where a device multiplies bf16 slower than float32, its peak is that of float32.
        types = {worker.decoder.dtype, torch.float32}
        return min(_fastest(_product(worker, first, first, first, dtype), repeats) for dtype in types)
    if kind == "read":
        return _fastest(_product(worker, first << 8, 1024, 1, torch.float32), repeats)
    if kind == "ask":
        return _asking(worker, first, second, repeats)
    if kind == "visit":
        _fastest(_visiting(worker, first, second), repeats)
        return 0.0
    if kind == "forward":
        return _fastest(_forward(worker, first), repeats)
    if kind == "chunk":
        return _fastest(_attention(worker, [BatchSegment(0, first, second, ((0, second + first),))], first), repeats)
    if kind == "decodes":
        # Slots of the past and of the new token, disjoint for each request as in a real batch.
        each = second + 1
        segments = [BatchSegment(i, 1, second, ((i * each, each),)) for i in range(first)]
        return _fastest(_attention(worker, segments, first), repeats)
    raise InvariantError(f"{kind!r} is no kind of measurement")


def compute(worker: ModelWorker, rows: int) -> None:
    """Run rows without history through the layers: what the number of threads is chosen by."""
    _forward(worker, min(rows, worker.pool.slots))()


def _fastest(run: Callable[[], object], repeats: int) -> float:
    """Return the least time of `repeats` runs, after one to warm up. Runs are as many on every rank."""
    run()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)


def _attention(
    worker: ModelWorker, segments: list[BatchSegment], rows: int, plan: Callable[[], AttentionPlan] | None = None
) -> Callable[[], None]:
    """Return a function that attends `segments` in all layers. plan: replaces the backend's plan of them."""
    decoder, pool = worker.decoder, worker.pool
    config = decoder.config
    q_heads, kv_heads = config.q_heads, config.kv_heads
    qkv = torch.randn(rows, q_heads + 2 * kv_heads, config.head_dim).to(decoder.device, decoder.dtype)
    q, k, v = qkv[:, :q_heads], qkv[:, q_heads : q_heads + kv_heads], qkv[:, q_heads + kv_heads :]

    def run() -> None:
        with torch.inference_mode():
            # Planning is part of an iteration's time.
            planned = decoder.backend.plan(segments, pool) if plan is None else plan()
            for layer in range(pool.layers):
                decoder.backend.run(layer, q, k, v, planned)
            if decoder.device.type == "cuda":
                torch.cuda.synchronize(decoder.device)

    return run


def _asking(worker: ModelWorker, rows: int, owner: int, repeats: int) -> float:
    """Measure shared minus unshared attention: the cost of copies, messages, the remote group's plan, and the merge."""
    backend = worker.decoder.backend
    assert isinstance(backend, GroupAttention)
    segment = BatchSegment(0, rows, 0, ((0, rows),))
    alone_s = _fastest(_attention(worker, [segment], rows), repeats)
    shared = _attention(
        worker, [segment], rows, lambda: backend.share([segment], worker.pool, [RemoteQuery(owner, (segment,))], ())
    )
    return max(0.0, _fastest(shared, repeats) - alone_s)


def _visiting(worker: ModelWorker, rows: int, owner: int) -> Callable[[], None]:
    backend, pool = worker.decoder.backend, worker.pool
    assert isinstance(backend, GroupAttention)

    def run() -> None:
        with torch.inference_mode():
            plan = backend.share((), pool, (), [RemoteRows(owner, rows, [(0, 1)])])
            for layer in range(pool.layers):
                backend.answer_queries(layer, plan)

    return run


def _product(worker: ModelWorker, rows: int, inner: int, columns: int, dtype: torch.dtype) -> Callable[[], None]:
    """Return a function that multiplies rows x inner by inner x columns."""
    device = worker.decoder.device
    left = torch.ones(rows, inner, dtype=dtype, device=device)
    right = torch.ones(inner, columns, dtype=dtype, device=device)

    @torch.inference_mode()
    def run() -> None:
        torch.mv(left, right[:, 0]) if columns == 1 else torch.mm(left, right)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return run


def _forward(worker: ModelWorker, rows: int) -> Callable[[], None]:
    decoder, pool = worker.decoder, worker.pool
    config, shard = decoder.config, decoder.shard
    tokens = torch.arange(rows) % config.vocab_size
    positions = torch.arange(rows)
    arrived = torch.randn(rows, config.hidden_size).to(decoder.device, decoder.dtype)

    @torch.inference_mode()
    def run() -> None:
        plan = decoder.backend.plan([BatchSegment(0, rows, 0, ((0, rows),))], pool)
        hidden = decoder.embed(tokens) if shard.first else arrived.clone()
        hidden = decoder.run_layers(hidden, decoder.rotary_table(positions), plan)
        if shard.last:
            decoder.head(hidden[-1:])

    return run


# How many threads compute an iteration, and on which cores.
#
# Measured on two cores under KVM (fp32 products of 16 x 512 x 512 and 256 x 512 x 512, one thread: 1.05 and 11.3 ms):
#
# - Two threads took 2.0 and 12.8 ms, which is why two were slower than one for small products. OpenMP's threads sleep
#   at
#   the end of an operator, and the kernel wakes them on the core of the thread that wakes them, where both stay. With a
#   core for each it is 0.66 and 6.3 ms, so computing threads are pinned.
# - Beside one busy process two threads take 1.8 and 16.7 ms, pinned or not, since each operator ends when the thread on
#   the busy core has had its turn; with threads that spin instead of sleeping 6.7 and 22 ms. One thread that the kernel
#   may move takes 1.1 and 12.0 ms. So where threads have to wait for a core, one computes, until that has passed.
# - An iteration can be too small for several threads: how small is measured at start.

SAMPLES = (1, 4, 16, 64, 256)
"""Rows of the iterations by which the number of threads is chosen."""
GAIN = 1.1
"""How much faster several threads must be."""
WINDOW_S = 0.2
"""Computing time after which waits for a core are looked at."""
WAITING_SHARE = 0.3
"""Share of its computing time that a thread may wait for a core. Above it, one thread is about as fast."""
BACKOFF_S = (0.5, 8.0)
"""How long one thread computes until several are tried again: at first, and at most."""
_CHOSEN = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""Environment variables by which a user places threads: with any of them set, nothing is pinned."""


class ComputeThreads:
    """Sets the number of threads for each iteration of the calling thread, and pins them while several compute.

    Made before anything is computed: threads that exist by then, and those of Python's, are left alone. most: threads
    of a large iteration. fixed: the user has chosen that number; it is neither measured nor changed. Nothing is pinned
    where `most` is one, or more than the cores, or the system cannot pin threads (Linux can).
    """

    def __init__(self, most: int, fixed: bool = False) -> None:
        usable = hasattr(os, "sched_setaffinity") and os.path.isdir("/proc/self/task")
        self._shares = shares(most) if usable and 2 <= most <= len(CORES) else []
        if any(name in os.environ for name in _CHOSEN):
            self._shares = []
        self.most, self.few_rows = most, 0
        """Fewer rows than `few_rows` are computed by one thread."""
        self._fixed = fixed
        self._strangers = _threads() if self._shares else frozenset[int]()
        self._helpers: list[int] = []
        self._bound = False
        self._alone_until_s, self._backoff_s = -1.0, BACKOFF_S[0]
        self._began_s = self._computed_s = 0.0
        """Start of the iteration, and computing time of several threads since their waits were last looked at."""
        self._waited_s = 0.0
        """Longest wait of a thread for a core in that time."""
        self._waits_before: list[float] = []
        self._words = "set" if fixed else "of this process"

    def begin(self, now: float, rows: float) -> None:
        """Choose for an iteration that begins at `now`, of work as of so many rows."""
        count = 1 if now < self._alone_until_s or rows < self.few_rows else self.most
        if torch.get_num_threads() != count:
            torch.set_num_threads(count)
        self._began_s = now
        if count > 1 and self._shares and not self._fixed:
            self._waits_before = self._waits()
        # Helpers start in the first iteration, and would inherit the affinity of the calling thread. One that was
        # changed from outside (`taskset -p`) stays.
        if count > 1 and self._helpers and os.sched_getaffinity(0) == set(CORES):
            self._bound = True
            os.sched_setaffinity(0, self._shares[0])

    def end(self, now: float) -> None:
        """Give the calling thread all cores again. Called after each iteration, also after one that failed."""
        if self._bound:
            self._bound = False
            os.sched_setaffinity(0, CORES)
        if not self._shares or torch.get_num_threads() == 1:
            return
        if not self._helpers:
            self._find_helpers()
        self._computed_s += now - self._began_s
        # Of this iteration only: between iterations, and in those of one thread, waits say nothing of several.
        waits = [after - before for after, before in zip(self._waits(), self._waits_before, strict=False)]
        self._waited_s += max(waits, default=0.0)
        if self._computed_s >= WINDOW_S:
            self._look(now)

    def choose(self, run: Callable[[int], object], budget_s: float = 0.3, keep: bool = False) -> None:
        """Measure iterations of `SAMPLES` rows by one thread and by all, in turns, up to the first at which all are
        faster, and set `few_rows`: what is larger gains more.

        run: computes so many rows. keep: all threads compute large iterations whatever this measures. The fastest turns
        count, since other load, as of the rest of a start, can only add time, to several threads most.
        """
        if self._fixed or self.most == 1:
            return
        stop = time.perf_counter() + budget_s
        # The number is not to change by itself meanwhile. Helpers are started and pinned before anything counts.
        self._fixed = True
        for _ in range(2):
            self._timed(run, SAMPLES[0], 0)
        began_s, waited_s = time.perf_counter(), self._waits()
        rows, gain = 0, 0.0
        for done, rows in enumerate(SAMPLES):
            until = time.perf_counter() + (stop - time.perf_counter()) / (len(SAMPLES) - done)
            one_s = all_s = math.inf
            for turn in range(15):
                if turn and time.perf_counter() >= until:
                    break
                one_s = min(one_s, self._timed(run, rows, rows + 1))
                all_s = min(all_s, self._timed(run, rows, 0))
            gain = one_s / all_s
            if gain >= GAIN or time.perf_counter() > stop:
                break
        self._fixed = False
        shares = [after - before for after, before in zip(self._waits(), waited_s, strict=True)]
        busy = max(shares, default=0.0) > WAITING_SHARE / 2 * (time.perf_counter() - began_s)
        self._settle(rows, gain, keep, busy)

    def described(self) -> str:
        """Return the choice in words."""
        count = f"{self.most} thread{'s' if self.most > 1 else ''}"
        few = f", 1 below {self.few_rows} rows" if self.few_rows > 1 else ""
        return f"{count}{few} ({self._words})"

    def _timed(self, run: Callable[[int], object], rows: int, few_rows: int) -> float:
        self.few_rows = few_rows
        self.begin(time.monotonic(), rows)
        # The setting of the number is no part of an iteration that has the same as the last.
        begun = time.perf_counter()
        try:
            run(rows)
        finally:
            ended = time.perf_counter()
            self.end(time.monotonic())
        return ended - begun

    def _settle(self, rows: int, gain: float, keep: bool, busy: bool) -> None:
        """Decide by the gain at the last number of rows that was measured. busy: threads had to wait for cores for much
        of the time."""
        self._words = f"measured: {gain:.1f} times one on {rows} row{'s' if rows > 1 else ''}"
        if gain >= GAIN:
            self.few_rows = rows if rows > SAMPLES[0] else 0
            return
        # Where several gain little on a sample they do on more work, unless they are slower.
        if not busy and gain > 1 / GAIN:
            self.few_rows = min(4 * rows, SAMPLES[-1])
            return
        if not busy and not keep:
            self.most, self.few_rows = 1, 0
            return
        self.few_rows = SAMPLES[len(SAMPLES) // 2]
        if not busy:
            self._words += ", as profiled"
            return
        # Measured beside other work, this says nothing of later: `begin` tries all threads again.
        self._alone_until_s = time.monotonic() + self._backoff_s
        self._words += ", beside other work"

    def _look(self, now: float) -> None:
        """Leave the cores to others if a thread had to wait for one for much of the last window."""
        waited_s, computed_s = self._waited_s, self._computed_s
        self._waited_s = self._computed_s = 0.0
        if self._fixed:
            return
        if waited_s <= WAITING_SHARE * computed_s:
            self._backoff_s = BACKOFF_S[0]
            return
        self._alone_until_s = now + self._backoff_s
        self._backoff_s = min(2 * self._backoff_s, BACKOFF_S[1])

    def _waits(self) -> list[float]:
        return _waits_s((threading.get_native_id(), *self._helpers))

    def _find_helpers(self) -> None:
        """Find the threads that a library has started for the calling one, and pin each."""
        # Python's own threads (heartbeats, watchers) do not compute and are not moved.
        known = {thread.native_id for thread in threading.enumerate()} | self._strangers
        self._helpers = sorted(_threads() - known)[: len(self._shares) - 1]
        for thread, place in zip(self._helpers, self._shares[1:], strict=False):
            with suppress(OSError):
                os.sched_setaffinity(thread, place)


def _threads() -> frozenset[int]:
    return frozenset(int(name) for name in os.listdir("/proc/self/task"))


def _waits_s(threads: tuple[int, ...]) -> list[float]:
    """Return for how long each thread has been ready to run without a core, in all; empty where it is not known."""
    try:
        return [int(_read(f"/proc/self/task/{thread}/schedstat").split()[1]) / 1e9 for thread in threads]
    except (OSError, IndexError):
        return []


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()
