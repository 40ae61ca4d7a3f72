"""One stage: a prefill chunk and a decode batch, one after the other, packed, and packed with prefetch.

Paper §III, the two conditions: operands of the running operator go first; KV of the next decode attention is fetched
with what bandwidth is left, into what buffer is free. The buffer fills from one decode attention to the next (output,
up, down of a layer; query-key-value and the chunk's attention of the following one) and is drained by it. Decode
attention then takes the longer of its computing and of fetching what is still missing.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

import msgspec

from headway_research.accelerator.machine import IterationWork
from headway_research.accelerator.mapping import OpCost
from headway_research.accelerator.operators import LayerOperators, OperatorSetting, layers_of

Mode = Literal["serial", "packing", "prefetch"]
MODES: tuple[Mode, Mode, Mode] = ("serial", "packing", "prefetch")


class TimelineSlot(NamedTuple):
    """An operator on the timeline."""

    op: OpCost
    start_s: float
    """Seconds from the layer's start."""
    end_s: float
    own_bytes: float
    """HBM bytes of the operator itself."""
    prefetched: float
    """KV bytes fetched during the operator for the next decode attention."""
    buffered: float
    """KV bytes in the buffer when it ends."""


class IterationTimeline(NamedTuple):
    """Times and bytes of one iteration: a first layer, steady layers, and the LM head."""

    mode: Mode
    total_s: float
    layer_s: float
    """Seconds of a steady layer."""
    first_s: float
    """Seconds of the first layer."""
    head_s: float
    """Seconds of the LM head."""
    slots: tuple[TimelineSlot, ...]
    """Operators of a steady layer."""
    hidden: float
    """KV bytes on chip before a steady layer's decode attention."""
    first_hidden: float
    """KV bytes on chip before the first layer's decode attention."""
    window: float
    """KV bytes that HBM could prefetch in a steady layer."""
    first_window: float
    """KV bytes that HBM could prefetch before the first layer's decode attention."""
    hbm_bytes: float
    """Bytes over HBM of all layers and the LM head."""
    compute_s: float
    """Arithmetic of all layers and the LM head."""


def run(setting: OperatorSetting, layer: LayerOperators, mode: Mode) -> IterationTimeline:
    """Compute one iteration: a phase alone in `serial`, else both packed, without or with prefetch."""
    shape, machine, _, assumed, _ = setting
    bandwidth, layers = machine.bandwidth, shape.layers
    sources = [op for op in layer.others if assumed.prefetch_in_attention or op is not layer.chunk]
    window = sum(op.idle_bytes(bandwidth) for op in sources)
    # Before the first layer's decode attention only that layer's own operators run.
    own = [op for op in (*layer.before, layer.chunk) if assumed.prefetch_in_attention or op is not layer.chunk]
    first_window = window if assumed.across_iterations else sum(op.idle_bytes(bandwidth) for op in own)
    hidden = ahead(setting, layer.decode, mode, window)
    first_hidden = ahead(setting, layer.decode, mode, first_window)
    slots = _slots(layer, bandwidth, hidden, mode, assumed.prefetch_in_attention)
    linear_s = sum(op.seconds(bandwidth) for op in layer.others)
    layer_s = linear_s + remaining_s(layer.decode, hidden, bandwidth)
    first_s = linear_s + remaining_s(layer.decode, first_hidden, bandwidth)
    head_s = layer.head.seconds(bandwidth)
    ops = (*layer.others, layer.decode)
    return IterationTimeline(
        mode=mode,
        total_s=first_s + (layers - 1) * layer_s + head_s,
        layer_s=layer_s,
        first_s=first_s,
        head_s=head_s,
        slots=slots,
        hidden=hidden,
        first_hidden=first_hidden,
        window=window,
        first_window=first_window,
        hbm_bytes=layers * sum(op.hbm_bytes for op in ops) + layer.head.hbm_bytes,
        compute_s=layers * sum(op.compute_s for op in ops) + layer.head.compute_s,
    )


def ahead(setting: OperatorSetting, decode: OpCost, mode: Mode, window: float) -> float:
    """Return the KV bytes on chip before decode attention begins: held ahead in the operand buffer, or prefetched.

    At most `window`, the bytes that HBM can fetch during the operators in between."""
    if mode == "serial" or not decode.hbm_bytes:
        return 0.0
    held = min(float(setting.assumed.ahead_bytes), decode.hbm_bytes, window)
    if mode == "packing":
        return held
    return max(held, min(float(setting.machine.prefetch_bytes), decode.hbm_bytes, window))


def remaining_s(decode: OpCost, hidden: float, bandwidth: float) -> float:
    """Return the seconds of decode attention with `hidden` of its KV bytes on chip already."""
    return max(decode.compute_s, (decode.hbm_bytes - hidden) / bandwidth)


def _slots(
    layer: LayerOperators, bandwidth: float, hidden: float, mode: Mode, in_attention: bool
) -> tuple[TimelineSlot, ...]:
    """Return the slots of a steady layer, from after one decode attention to the end of the next.

    The buffer starts empty: the decode attention before has drained it."""
    left = hidden if mode == "prefetch" else 0.0
    slots, now, buffered = [], 0.0, 0.0
    for op in (*layer.after, *layer.before, layer.chunk):
        seconds = op.seconds(bandwidth)
        may = mode == "prefetch" and (in_attention or op is not layer.chunk)
        fetched = min(left, op.idle_bytes(bandwidth)) if may else 0.0
        left, buffered = left - fetched, buffered + fetched
        if seconds:
            slots.append(TimelineSlot(op, now, now + seconds, op.hbm_bytes, fetched, buffered))
        now += seconds
    if layer.decode.hbm_bytes:
        end = now + remaining_s(layer.decode, hidden, bandwidth)
        slots.append(TimelineSlot(layer.decode, now, end, layer.decode.hbm_bytes - buffered, 0.0, 0.0))
    return tuple(slots)


class StageReport(NamedTuple):
    """Timelines of one stage under each schedule, in seconds and bytes."""

    setting: OperatorSetting
    work: IterationWork
    layers: tuple[LayerOperators, LayerOperators, LayerOperators]
    """Operators of (both phases packed, the chunk alone, the decodes alone)."""
    prefill: IterationTimeline | None
    """The chunk alone; serial execution is `prefill`, then `decode`."""
    decode: IterationTimeline | None
    """The decode batch alone."""
    packing: IterationTimeline
    """Both phases in one iteration, without prefetch."""
    prefetch: IterationTimeline
    """Both phases in one iteration, with prefetch."""

    @property
    def prefill_s(self) -> float:
        """Seconds of the chunk alone: its TTFT where the chunk is a whole prompt."""
        return self.prefill.total_s if self.prefill is not None else 0.0

    @property
    def decode_s(self) -> float:
        """Seconds of the decode batch alone: its TBT without a prefill."""
        return self.decode.total_s if self.decode is not None else 0.0

    @property
    def serial_s(self) -> float:
        return self.prefill_s + self.decode_s

    def total_s(self, mode: Mode) -> float:
        """Return the seconds of the iteration: the TBT of decodes batched with the chunk."""
        if mode == "serial":
            return self.serial_s
        # Where packing would cost more than it saves, the phases run one after the other.
        packed = min(self.packing.total_s, self.serial_s)
        return packed if mode == "packing" else min(self.prefetch.total_s, packed)

    def decode_share_s(self, mode: Mode) -> float:
        """Return the seconds that decodes add to the chunk alone: the paper's decode latency in a packed stage."""
        return self.total_s(mode) - self.prefill_s

    def decode_speedup(self, mode: Mode) -> float:
        """Return the speed-up over the decode batch alone, as the paper defines it; infinite where decodes add 0 s."""
        share = self.decode_share_s(mode)
        return self.decode_s / share if share > 0 else float("inf")

    def overall_speedup(self, mode: Mode) -> float:
        return self.serial_s / self.total_s(mode)

    @property
    def memory_bytes(self) -> float:
        """Bytes of HBM for weights and the stage's KV."""
        shape, precision = self.setting.model, self.setting.precision
        head = (
            2 * shape.vocab * shape.hidden // (2 if shape.tied_embeddings else 1) if self.setting.assumed.lm_head else 0
        )
        weights = (shape.layers * shape.layer_parameters + head) * precision.weight_bytes
        tokens = self.work.kv_tokens + self.work.prefill_tokens + self.work.prefill_past
        return weights + tokens * shape.layers * self.setting.kv_bytes


def evaluate(setting: OperatorSetting, work: IterationWork) -> StageReport:
    """Compute a stage. Raises ConfigError where tiles do not fit the machine."""
    chunk, batch = bool(work.prefill_tokens), bool(work.decodes)
    # One search maps all three iterations; a stage of one phase is its own phase alone.
    works = [work]
    if chunk and batch:
        works += [work.prefill_only, work.decode_only]
    found = layers_of(setting, works)
    packed = found[0]
    alone, decodes = (found[1], found[2]) if chunk and batch else (packed, packed)
    return StageReport(
        setting=setting,
        work=work,
        layers=(packed, alone, decodes),
        prefill=run(setting, alone, "serial") if chunk else None,
        decode=run(setting, decodes, "serial") if batch else None,
        packing=run(setting, packed, "packing"),
        prefetch=run(setting, packed, "prefetch"),
    )


simulate_stage = lru_cache(maxsize=65536)(evaluate)
"""`evaluate` with a cache: microseconds for a stage computed before."""


# Smallest sufficient resources: the buffer that hides all KV traffic, packing's equivalent bandwidth, the chunk.
#
# "Hidden" means that decode attention of a steady layer takes no longer than its arithmetic: KV that arrives while it
# computes need not be buffered.


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
