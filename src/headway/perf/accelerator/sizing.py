"""How much is enough: the buffer that hides all KV traffic, the bandwidth that packing alone would need, the chunk.

Each in closed form and by search over whole stages; tests hold both equal. "Hidden" means that decode attention of a
steady layer takes no longer than its arithmetic: KV that arrives while it computes need not be in the buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from headway.perf.accelerator.cost import OpCost
from headway.perf.accelerator.iteration_work import IterationWork
from headway.perf.accelerator.operators import LayerOperators, OperatorSetting, layers_of
from headway.perf.accelerator.stage import simulate_stage
from headway.perf.accelerator.timeline import ahead, run


class BufferAnswer(NamedTuple):
    """Bytes. kv: one layer's KV. needed: what must be on chip when decode attention begins. window: what idle HBM
    can bring between two of them. hides: whether the window suffices. smallest: the smallest buffer that hides all KV
    traffic (None where none does). useful: beyond it more buffer buys nothing."""

    kv: float
    needed: float
    window: float
    hides: bool
    smallest: float | None
    useful: float


def buffer(setting: OperatorSetting, work: IterationWork) -> BufferAnswer:
    """Closed form: needed = KV - attention's own time x bandwidth; the window is the sum of idle bytes.

    What the operand buffer holds ahead anyway needs no buffer; a prefetch must exceed that to be of use."""
    layer = layers_of(setting, [work])[0]
    line = run(setting, layer, "prefetch")
    held = ahead(setting, layer.decode, "packing", line.window)
    needed = max(0.0, layer.decode.hbm_bytes - layer.decode.compute_s * setting.machine.bandwidth)
    windows = (line.window, line.first_window)
    hides = needed <= max(line.window, held)
    useful = max(min(needed, window) for window in windows)
    useful = useful if useful > held else 0.0
    return BufferAnswer(layer.decode.hbm_bytes, needed, line.window, hides, useful if hides else None, useful)


def searched_buffer(setting: OperatorSetting, work: IterationWork) -> float:
    """The smallest buffer, to a byte, with which the stage is as fast as with any: by halving over whole stages."""

    def seconds(size: int) -> float:
        machine = setting.machine.with_(prefetch_bytes=size)
        return simulate_stage(setting._replace(machine=machine), work).prefetch.total_s

    most = int(layers_of(setting, [work])[0].decode.hbm_bytes) + 1
    best = seconds(most)
    return float(_least(lambda size: seconds(size) <= best * (1 + 1e-12), 0, most))


def packing_bandwidth(setting: OperatorSetting, work: IterationWork) -> float | None:
    """HBM bytes/s with which packing alone would be as fast as packing-prefetch is at the machine's; None where no
    bandwidth suffices.

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
    """Packing's time as a function of 1/bandwidth."""

    def __init__(self, setting: OperatorSetting, layer: LayerOperators) -> None:
        self.layers, self.held = setting.shape.layers, float(setting.assumed.ahead_bytes)
        self.cold = not setting.assumed.across_iterations
        self.decode, self.head = layer.decode, layer.head
        self.ops = layer.others
        counted = setting.assumed.prefetch_in_attention
        self.idle = [op for op in layer.others if counted or op is not layer.chunk]
        self.first = [op for op in (*layer.before, layer.chunk) if counted or op is not layer.chunk]

    def breaks(self) -> list[float]:
        ops = (*self.ops, self.head)
        return [op.compute_s / rest for op in ops if (rest := op.hbm_bytes - op.fill_bytes) > 0]

    def at(self, x: float) -> list[float]:
        """Every combination of the three lines of the first layer and of the others."""
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
    """The same by halving over whole stages."""
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
    while high / low > 1 + 1e-9:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def smallest_chunk(setting: OperatorSetting, work: IterationWork, most: int = 1 << 17) -> int | None:
    """The smallest prefill chunk, in place of the stage's, beside which idle HBM can bring all KV that must be on chip;
    None when `most` tokens do not. (A search: products and attention grow in steps.)"""

    def enough(tokens: int) -> bool:
        found = buffer(setting, IterationWork(**{**_fields(work), "prefill_tokens": tokens}))
        return found.hides

    return _least(enough, 1, most) if enough(most) else None


def _fields(work: IterationWork) -> dict[str, int]:
    return {name: getattr(work, name) for name in work.__struct_fields__}


def _least(true: Callable[[int], bool], low: int, high: int) -> int:
    """The least whole number in low..high for which a monotone predicate holds; it must hold for `high`."""
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if true(middle) else (middle + 1, high)
    return low
