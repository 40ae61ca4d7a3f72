"""Smallest sufficient resources: the buffer that hides all KV traffic, packing's equivalent bandwidth, the chunk.

Buffer and bandwidth in closed form and by search over whole stages; tests compare both. "Hidden" means that decode
attention of a steady layer takes no longer than its arithmetic: KV that arrives while it computes need not be buffered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from headway_research.accelerator.machine import IterationWork
from headway_research.accelerator.mapping import OpCost
from headway_research.accelerator.operators import LayerOperators, OperatorSetting, layers_of
from headway_research.accelerator.stage import ahead, run, simulate_stage


class BufferAnswer(NamedTuple):
    """Sizes in bytes."""

    kv: float
    """KV that one layer's decode attention reads."""
    needed: float
    """KV that must be on chip when decode attention begins."""
    window: float
    """KV that idle HBM can fetch between two decode attentions."""
    hides: bool
    """The window suffices."""
    smallest: float | None
    """Smallest buffer that hides all KV traffic; None where none does."""
    useful: float
    """Buffer beyond which time no longer falls."""


def buffer(setting: OperatorSetting, work: IterationWork) -> BufferAnswer:
    """Return the buffer sizes in closed form: needed = KV - attention's arithmetic time × bandwidth.

    The window is the sum of idle bytes. KV that the operand buffer holds ahead anyway needs no buffer; a prefetch must
    exceed it to be useful."""
    layer = layers_of(setting, [work])[0]
    line = run(setting, layer, "prefetch")
    held = ahead(setting, layer.decode, "packing", line.window)
    needed = max(0.0, layer.decode.hbm_bytes - layer.decode.compute_s * setting.machine.bandwidth)
    # The first layer's window is shorter where nothing was prefetched by the iteration before.
    windows = (line.window, line.first_window)
    hides = needed <= max(line.window, held)
    useful = max(min(needed, window) for window in windows)
    useful = useful if useful > held else 0.0
    return BufferAnswer(layer.decode.hbm_bytes, needed, line.window, hides, useful if hides else None, useful)


def searched_buffer(setting: OperatorSetting, work: IterationWork) -> float:
    """Return the smallest buffer, to a byte, with which the stage is as fast as with any, by bisection over stages."""

    def seconds(size: int) -> float:
        machine = setting.machine.with_(prefetch_bytes=size)
        return simulate_stage(setting._replace(machine=machine), work).prefetch.total_s

    # A buffer of all of one layer's KV is never exceeded.
    most = int(layers_of(setting, [work])[0].decode.hbm_bytes) + 1
    best = seconds(most)
    return float(_least(lambda size: seconds(size) <= best * (1 + 1e-12), 0, most))


def packing_bandwidth(setting: OperatorSetting, work: IterationWork) -> float | None:
    """Return the HBM bytes/s at which packing alone is as fast as packing-prefetch at the machine's bandwidth.

    None where no bandwidth suffices.

    Exact. With x = 1/bandwidth operators take fill·x + max(compute, rest·x), and HBM is idle for max(0, compute -
    rest·x) beside each. Between two breakpoints compute/rest all that is linear, and packing's time the largest of
    three lines: decode attention bound by its arithmetic, by the KV that the operand buffer could not hold ahead, or by
    the KV that there was no idle time for. The solution is where the first of them meets the target."""
    layer = layers_of(setting, [work])[0]
    target = run(setting, layer, "prefetch").total_s * (1 + 1e-12)
    here = 1.0 / setting.machine.bandwidth
    lines = _PackingLines(setting, layer)
    if lines.seconds(here) <= target:
        return setting.machine.bandwidth
    # Time is non-decreasing in x = 1/bandwidth: the target lies in the segment after the last point that meets it.
    points = [0.0, *sorted(x for x in lines.breaks() if 0 < x < here), here]
    at = max((i for i, x in enumerate(points) if lines.seconds(x) <= target), default=-1)
    if at < 0:
        return None
    low, high = points[at], points[at + 1]
    crossings = [
        low + (target - before) / (after - before) * (high - low)
        for before, after in zip(lines.at(low), lines.at(high), strict=True)
        if after > target
    ]
    x = min(crossings)
    return 1.0 / x if x > 0 else None


class _PackingLines:
    """Packing's time as a function of x = 1/bandwidth: the largest of several piecewise linear functions."""

    def __init__(self, setting: OperatorSetting, layer: LayerOperators) -> None:
        self.layers, self.held = setting.shape.layers, float(setting.assumed.ahead_bytes)
        self.cold = not setting.assumed.across_iterations
        self.decode, self.head = layer.decode, layer.head
        self.ops = layer.others
        counted = setting.assumed.prefetch_in_attention
        self.idle = [op for op in layer.others if counted or op is not layer.chunk]
        self.first = [op for op in (*layer.before, layer.chunk) if counted or op is not layer.chunk]

    def breaks(self) -> list[float]:
        """Return the x at which an operator changes from compute-bound to memory-bound."""
        ops = (*self.ops, self.head)
        return [op.compute_s / rest for op in ops if (rest := op.hbm_bytes - op.fill_bytes) > 0]

    def at(self, x: float) -> list[float]:
        """Return the time at x for every combination of the three lines of the first layer and of the others."""
        plain = self.layers * sum(_seconds(op, x) for op in self.ops) + _seconds(self.head, x)
        steady = self._attention(self.idle, x)
        first = self._attention(self.first if self.cold else self.idle, x)
        return [plain + (self.layers - 1) * s + f for s in steady for f in first]

    def seconds(self, x: float) -> float:
        return max(self.at(x))

    def _attention(self, idle: Sequence[OpCost], x: float) -> tuple[float, float, float]:
        moved = self.decode.hbm_bytes
        window_s = sum(max(0.0, op.compute_s - (op.hbm_bytes - op.fill_bytes) * x) for op in idle)
        return self.decode.compute_s, max(0.0, moved - self.held) * x, moved * x - window_s


def _seconds(op: OpCost, x: float) -> float:
    return op.fill_bytes * x + max(op.compute_s, (op.hbm_bytes - op.fill_bytes) * x)


def searched_bandwidth(setting: OperatorSetting, work: IterationWork) -> float | None:
    """Return `packing_bandwidth` by bisection over whole stages; None above 1,024 times the machine's bandwidth."""
    target = simulate_stage(setting, work).prefetch.total_s

    def enough(bandwidth: float) -> bool:
        machine = setting.machine.with_(bandwidth=bandwidth)
        found = simulate_stage(setting._replace(machine=machine), work).packing.total_s
        return found <= target * (1 + 1e-12)

    low, high = setting.machine.bandwidth, setting.machine.bandwidth * 1024
    if enough(low):
        return low
    if not enough(high):
        return None
    # Geometric bisection; `high` suffices, `low` does not.
    while high / low > 1 + 1e-9:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def smallest_chunk(setting: OperatorSetting, work: IterationWork, most: int = 1 << 17) -> int | None:
    """Return the smallest prefill chunk, in place of the stage's, during which idle HBM can fetch all needed KV.

    None when `most` tokens do not suffice. By search, because products and attention grow in steps."""

    def enough(tokens: int) -> bool:
        found = buffer(setting, IterationWork(**{**_fields(work), "prefill_tokens": tokens}))
        return found.hides

    return _least(enough, 1, most) if enough(most) else None


def _fields(work: IterationWork) -> dict[str, int]:
    return {name: getattr(work, name) for name in work.__struct_fields__}


def _least(true: Callable[[int], bool], low: int, high: int) -> int:
    """Return the least integer in low..high for which a monotone predicate holds; it must hold for `high`."""
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if true(middle) else (middle + 1, high)
    return low
