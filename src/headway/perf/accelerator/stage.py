"""One stage: a prefill chunk and a decode batch, one after the other, packed, and packed with prefetch."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from headway.perf.accelerator.attention import kv_bytes
from headway.perf.accelerator.iteration_work import IterationWork
from headway.perf.accelerator.operators import LayerOperators, OperatorSetting, layers_of
from headway.perf.accelerator.timeline import IterationTimeline, Mode, run


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
        return weights + tokens * shape.layers * kv_bytes(shape, precision)


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
