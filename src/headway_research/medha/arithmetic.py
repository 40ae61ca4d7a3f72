"""Times that need no scheduler: a lone prefill, a lone decode, and both under KV parallelism.

All times come from the shipped operator fits (`perf.latency.fitted`) for one pipeline stage; every stage is taken as
slow as the last, which has the LM head. Public measurements end at 12K tokens of history on an H100 (4K on an A100), so
results for longer contexts are extrapolated by the fit.

The two modes differ in the kernel. paper: attention of a chunk over its history is spread over the whole device from
the first token on, as Medha §3.1 states of its kernels; and on an H100 it takes 1.7 times as long as the profiles have
it. These are of FlashAttention-3 (628 TFLOP/s over long histories; published: 648, arXiv 2407.08608); the papers ran
FlashInfer before its Hopper kernel (December 2024) or FlashAttention-2, which reaches 370 (same source). FlashInfer's
issue 521 has 1.7 to 1.9, of one H20 and prompts of up to 2,048 tokens. default: the profiles' kernel, as measured up to
the measured history, split over the device only beyond it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec
import numpy as np

from headway.perf.hardware import AcceleratorSpec, ModelShape, ParallelLayout, RankShape, accelerator, model, rank_shape
from headway.perf.latency.base import BatchLoad, Seconds, solve_tokens
from headway.perf.latency.device_fit import EngineAssumptions
from headway.perf.latency.fitted import fitted_source
from headway.perf.latency.table import TableLatency, TableSource
from headway.sim.report.page import ReportChart
from headway_research.base import ClaimRow, ExperimentReport, Mode, source

FA3_FLOPS, FA2_FLOPS = 628e12, 370e12
"""FLOP/s of attention over long histories on an H100: as the profiles have it, and of the papers' kernel."""
PAPER_KERNEL = "Attention at FlashAttention-2's 370 TFLOP/s, the speed of the kernels of the paper's date"
# chunks of a static prefill that are computed; the others are interpolated
SAMPLES = 400
LEAST_CHUNK = 16


@dataclass(frozen=True)
class InstanceModel:
    """One instance: the latency of a stage, and the cost of hops between stages and of merges between KV groups."""

    device: AcceleratorSpec
    shape: ModelShape
    layout: ParallelLayout
    latency: TableLatency

    @property
    def stages(self) -> int:
        return self.layout.stages

    @property
    def part(self) -> RankShape:
        """The share of a rank of the first stage, which has the most layers."""
        return rank_shape(self.shape, self.layout, 0)

    def hop_s(self, rows: int) -> float:
        """Return the seconds to send `rows` rows of activations to the next stage, each rank over its own link."""
        return self.layout.stage_link(self.device).transfer_s(
            rows * self.shape.hidden * self.shape.dtype_bytes // self.layout.tp
        )

    def merge_s(self, rows: int, groups: int) -> float:
        """Return the seconds of KV parallelism's all-gather, over a stage's layers.

        Each group sends the fp32 partial outputs and log-sum-exps of its heads to each of the others, between nodes.
        """
        if groups == 1:
            return 0.0
        link = self.layout.across_link(self.device)
        # head_dim outputs and one log-sum-exp for each row and head, four bytes each
        partial = rows * self.part.q_heads * (self.part.head_dim + 1) * 4
        return self.part.layers * link.transfer_s((groups - 1) * partial)

    def chunk_s(self, past: float, tokens: int, decodes: int = 0, decode_kv: int = 0, groups: int = 1) -> float:
        """Return the seconds of one iteration on a stage: one chunk beside decodes, with the history cut over `groups`.

        Mnemosyne Eq. 9: attention is divided by the groups, all else stays, and the merge is added.
        """
        rows = tokens + decodes
        seconds = self.latency.rows_s(rows)
        # attention of the chunk over its history; linear layers are in `rows_s`
        if tokens:
            seconds += self.latency.attention_s(round(past / groups), tokens)
        if decodes:
            seconds += self.latency.decode_s(decodes, decode_kv // groups)
        return seconds + self.merge_s(rows, groups)

    def through_s(self, stage_s: float, rows: int) -> float:
        """Return the seconds from entering the first stage to leaving the last."""
        return self.stages * stage_s + (self.stages - 1) * self.hop_s(rows)

    def tbt_s(self, past: int, chunk: int = 0, groups: int = 1, chunk_past: int = 0) -> float:
        """Return the time between tokens of one decode over `past` tokens, beside a chunk of another prompt if given.

        A token leaves the last stage before the next one enters the first.
        """
        return self.through_s(self.chunk_s(chunk_past, chunk, 1, past, groups), 1 + chunk)


@dataclass(frozen=True)
class LonePrefill:
    """The times of a lone prefill."""

    ttft_s: float
    iterations: Seconds
    """Seconds on a stage by chunk, in order; those of equal chunks may be interpolated between samples."""

    @property
    def worst_s(self) -> float:
        return float(self.iterations.max())

    def percentile_s(self, percent: float) -> float:
        return float(np.percentile(self.iterations, percent))


@cache
def machine(name: str, stages: int, mode: Mode, tp: int = 8) -> InstanceModel:
    """Return an instance of H100s by the name of its model; the latency fit is compiled once."""
    layout = ParallelLayout(tp=tp, stages=stages)
    assumptions = EngineAssumptions(engine="headway", split_kv="always" if mode == "paper" else "beyond")
    table = fitted_source("h100", name, layout, stages - 1, assumptions=assumptions)
    if mode == "paper":
        table = _slower(table, FA3_FLOPS / FA2_FLOPS)
    return InstanceModel(accelerator("h100"), model(name), layout, TableLatency(table))


def _slower(table: TableSource, times: float) -> TableSource:
    """Return a table whose attention of chunks, over themselves and their histories, takes `times` as long."""

    def scaled(rows: Sequence[tuple[int, float, float]]) -> tuple[tuple[int, float, float], ...]:
        return tuple((tokens, own * times, over * times) for tokens, own, over in rows)

    past = table.past and msgspec.structs.replace(table.past, chunks=scaled(table.past.chunks))
    return msgspec.structs.replace(
        table, fingerprint=f"{table.fingerprint}|attention ×{times:.2f}", chunks=scaled(table.chunks), past=past
    )


def static_prefill(m: InstanceModel, prompt: int, chunk: int, groups: int = 1) -> LonePrefill:
    """Return a lone prefill in equal chunks, each entering the first stage as the one before leaves it (SPP).

    With several KV groups one joins after each equal share of the prompt, and a chunk's history is the part on the
    fullest group (Mnemosyne's Eq. 10 cuts it evenly; here shards are only appended to).
    """
    shard = -(-prompt // groups)

    def chunk_s(past: float, tokens: int) -> float:
        return m.chunk_s(min(past, shard), tokens) + m.merge_s(tokens, 1 + int(past // shard))

    starts = np.arange(0, prompt, chunk)
    # a chunk's time is close to linear in its history: compute a sample, interpolate the rest
    at = starts if starts.size <= SAMPLES else starts[np.unique(np.linspace(0, starts.size - 1, SAMPLES).astype(int))]
    seconds = np.array([chunk_s(past, chunk) for past in at.tolist()])
    if at.size < starts.size:
        seconds = np.interp(starts, at, seconds)
    # the last chunk may be shorter, and is never interpolated
    last = prompt - int(starts[-1])
    if last < chunk:
        seconds[-1] = chunk_s(float(starts[-1]), last)
    # the last chunk passes the other stages after the first one has computed all chunks
    tail = (m.stages - 1) * (float(seconds[-1]) + m.hop_s(last))
    return LonePrefill(float(seconds.sum()) + tail, seconds)


def adaptive_prefill(m: InstanceModel, prompt: int, t_target_s: float) -> LonePrefill:
    """Return a lone prefill in the largest chunks that take `t_target_s` on a stage, at least LEAST_CHUNK tokens
    (Medha §3.2)."""
    past, seconds, chunk = 0, [], 0
    while past < prompt:
        chunk, _ = solve_tokens(m.latency, BatchLoad(), past, prompt - past, t_target_s)
        chunk = min(max(chunk, LEAST_CHUNK), prompt - past)
        seconds.append(m.chunk_s(past, chunk))
        past += chunk
    # chunks differ in time: the last one waits in later stages for the slowest before it
    tail = (m.stages - 1) * (max(seconds[-m.stages :]) + m.hop_s(chunk))
    return LonePrefill(sum(seconds) + tail, np.array(seconds))


def prefill_flops(shape: ModelShape, prompt: int) -> float:
    """Return the model FLOPs of a prompt, with attention counted causally."""
    return shape.linear_flops(prompt) + shape.attention_flops(prompt, 0)


def lone_report(
    scenario: str, machines: Iterable[InstanceModel], rows: Iterable[ClaimRow], *panels: ReportChart, **more: Any
) -> ExperimentReport:
    """Return a report whose times come from this module. more: of its `source`."""
    unique = {m.latency.source.fingerprint: m.latency.source for m in machines}
    latency = [
        {
            "of": name,
            "status": each.status,
            "families": each.details.get("families", {}),
            "validated_history": each.validated_past,
            "provenance": each.provenance,
        }
        for name, each in unique.items()
    ]
    modes = (
        "paper: attention at the rate of FlashAttention-2, KV split over the device always; default: FlashAttention-3, "
        "as profiled, KV split beyond the measured history"
    )
    return ExperimentReport(source=source(latency, scenario, modes=modes, **more), rows=tuple(rows), panels=panels)
