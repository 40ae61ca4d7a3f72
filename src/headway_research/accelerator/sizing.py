"""Smallest sufficient resources: the buffer that hides all KV traffic, packing's equivalent bandwidth, the chunk.

"Hidden" means that decode attention of a steady layer takes no longer than its arithmetic: KV that arrives while it
computes need not be buffered.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from headway_research.accelerator.machine import IterationWork
from headway_research.accelerator.operators import OperatorSetting, layers_of
from headway_research.accelerator.stage import ahead, run


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


def packing_bandwidth(setting: OperatorSetting, work: IterationWork, most: float = 1024.0) -> float | None:
    """Return the HBM bytes/s at which packing alone is as fast as packing-prefetch at the machine's bandwidth.

    By bisection, to 1e-9: no operator's mapping depends on bandwidth (`OpCost`). None above `most` times the machine's
    bandwidth."""
    layer = layers_of(setting, [work])[0]
    target_s = run(setting, layer, "prefetch").total_s * (1 + 1e-12)

    def enough(bandwidth: float) -> bool:
        machine = setting.machine.with_(bandwidth=bandwidth)
        return run(setting._replace(machine=machine), layer, "packing").total_s <= target_s

    low, high = setting.machine.bandwidth, setting.machine.bandwidth * most
    if enough(low):
        return low
    if not enough(high):
        return None
    # geometric bisection; `high` suffices, `low` does not
    while high / low > 1 + 1e-9:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def smallest_chunk(setting: OperatorSetting, work: IterationWork, most: int = 1 << 17) -> int | None:
    """Return the smallest prefill chunk, in place of the stage's, during which idle HBM can fetch all needed KV.

    None when `most` tokens do not suffice."""

    def enough(tokens: int) -> bool:
        return buffer(setting, msgspec.structs.replace(work, prefill_tokens=tokens)).hides

    # products and attention grow in steps: the least of them is searched
    low, high = 1, most
    if not enough(high):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle + 1, high)
    return low
