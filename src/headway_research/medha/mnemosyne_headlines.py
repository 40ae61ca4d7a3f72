"""Mnemosyne's headline numbers: 1.75× at chunks of 32, 30 ms TBT at 10M tokens, 30 s TTFT at 2M; 2.4 ExaFLOP, 320 GB.

TBT at 10M is that of a request served by KV groups; the rest a lone prefill of Llama-3 8B over 16 stages of TP8.
"""

from __future__ import annotations

from functools import partial

from headway.perf.hardware import model
from headway_research.base import MODES, ExperimentReport, Mode, RunOptions
from headway_research.medha.adaptive_pareto import slowdown
from headway_research.medha.arithmetic import latency_source, machine, prefill_flops
from headway_research.medha.kvp_decode import tbt_s
from headway_research.medha.spp_scaling import ttft_s
from headway_research.verdicts import at_most, band, both, judge

PROMPT = 1_000_000


def run(options: RunOptions) -> ExperimentReport:
    """See the module."""
    shape = model("llama-3-70b")
    whole = prefill_flops(shape, PROMPT) + shape.attention_flops(PROMPT, 0)

    def exaflop(mode: Mode) -> float:
        return (whole if mode == "paper" else prefill_flops(shape, PROMPT)) / 1e18

    rows = [
        slowdown(200_000 if options.quick else PROMPT),
        judge(
            "8B, 10M tokens, 4 KV groups on 128 H100s: TBT, seconds",
            "<= 0.030",
            at_most(0.030),
            both(partial(tbt_s, "llama-3-8b", 10_000_000, 4)),
        ),
        judge(
            "8B, 2M tokens on 128 H100s: TTFT, seconds",
            "<= 30",
            at_most(30.0),
            both(partial(ttft_s, "llama-3-8b", 16, 2_000_000)),
        ),
        judge(
            "70B, 1M tokens: ExaFLOP of a prefill",
            "2.4 (Medha: 2.8)",
            band(2.3, 2.9),
            both(exaflop),
            "paper mode counts attention whole, as the papers' equation does; default mode counts it causal.",
        ),
        judge(
            "70B, 1M tokens: KV cache, GB",
            320,
            band(310, 330),
            both(lambda mode: shape.kv_bytes_per_token * PROMPT / 1e9),
        ),
    ]
    machines = [machine("h100", "llama-3-8b", 8, stages, mode) for stages in (1, 4, 16) for mode in MODES]
    return ExperimentReport(
        source=latency_source(*machines, scenario="Llama-3 8B (and 70B's counts), up to 128 H100s"), rows=tuple(rows)
    )
