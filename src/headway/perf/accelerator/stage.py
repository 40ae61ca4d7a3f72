"""One stage: a prefill chunk and a decode batch, one after the other, packed, and packed with prefetch."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from headway.perf.accelerator.attention import kv_bytes
from headway.perf.accelerator.iteration_work import IterationWork
from headway.perf.accelerator.operators import LayerOperators, OperatorSetting, layers_of
from headway.perf.accelerator.timeline import IterationTimeline, Mode, run


class StageReport(NamedTuple):
    """Everything about one stage, in seconds and bytes.

    prefill, decode: each phase alone (the serial execution is both, one after the other). packing, prefetch: both
    phases in one iteration; where packing would cost more than it saves, the two phases one after the other.
    """

    setting: OperatorSetting
    work: IterationWork
    layers: tuple[LayerOperators, LayerOperators, LayerOperators]
    prefill: IterationTimeline | None
    decode: IterationTimeline | None
    packing: IterationTimeline
    prefetch: IterationTimeline

    @property
    def prefill_s(self) -> float:
        """The chunk alone: its TTFT where the chunk is a whole prompt."""
        return self.prefill.total_s if self.prefill is not None else 0.0

    @property
    def decode_s(self) -> float:
        """The decode batch alone: its TBT without anybody's prefill."""
        return self.decode.total_s if self.decode is not None else 0.0

    @property
    def serial_s(self) -> float:
        return self.prefill_s + self.decode_s

    def total_s(self, mode: Mode) -> float:
        """The iteration: what decodes beside the chunk see as TBT."""
        if mode == "serial":
            return self.serial_s
        packed = min(self.packing.total_s, self.serial_s)
        return packed if mode == "packing" else min(self.prefetch.total_s, packed)

    def decode_share_s(self, mode: Mode) -> float:
        """What decodes add to the chunk alone: the paper's decode latency in a packed stage."""
        return self.total_s(mode) - self.prefill_s

    def decode_speedup(self, mode: Mode) -> float:
        """Over the decode batch alone, in the paper's sense. Infinite where decodes come for nothing."""
        share = self.decode_share_s(mode)
        return self.decode_s / share if share > 0 else float("inf")

    def overall_speedup(self, mode: Mode) -> float:
        return self.serial_s / self.total_s(mode)

    @property
    def memory_bytes(self) -> float:
        """HBM that weights and the stage's KV take."""
        shape, precision = self.setting.model, self.setting.precision
        head = (
            2 * shape.vocab * shape.hidden // (2 if shape.tied_embeddings else 1) if self.setting.assumed.lm_head else 0
        )
        weights = (shape.layers * shape.layer_parameters + head) * precision.weight_bytes
        tokens = self.work.kv_tokens + self.work.prefill_tokens + self.work.prefill_past
        return weights + tokens * shape.layers * kv_bytes(shape, precision)


def evaluate(setting: OperatorSetting, work: IterationWork) -> StageReport:
    """The stage, computed. Raises ConfigError where tiles do not fit the machine."""
    chunk, batch = bool(work.prefill_tokens), bool(work.decodes)
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
"""`evaluate`, remembered: microseconds for a stage that was asked for before."""
