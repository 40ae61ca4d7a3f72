"""Medha Fig. 4 and Mnemosyne Fig. 8: static chunks against adaptive ones, and chunks of 32 against 4096.

Llama-3 8B, 8 H100s (TP8, one stage), one prompt of 1M tokens alone: time to the first token over the P95 and the worst
iteration, the wait of a decode in the same batches. Adaptive: the largest chunk within a time, from 10 to 200 ms.
"""

from __future__ import annotations

from headway.sim.report.page import ReportChart
from headway_research.base import MODES, ClaimRow, ExperimentReport, Mode, RunOptions
from headway_research.medha.arithmetic import adaptive_prefill, latency_source, machine, static_prefill
from headway_research.verdicts import at_most, band, both, descending, judge, order

PROMPT = 1_000_000
CHUNKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
TARGETS_S = (0.02, 0.03, 0.05, 0.1, 0.2)


def _prompt(options: RunOptions) -> int:
    return 200_000 if options.quick else PROMPT


def _static(mode: Mode, prompt: int) -> dict[int, tuple[float, float]]:
    m = machine("h100", "llama-3-8b", 8, 1, mode)
    found = {chunk: static_prefill(m, prompt, chunk) for chunk in CHUNKS}
    return {chunk: (p.ttft_s, p.worst_s) for chunk, p in found.items()}


def medha(options: RunOptions) -> ExperimentReport:
    """Reproduce Medha Fig. 4: adaptive chunking is on the Pareto front of TTFT and worst iteration."""
    prompt = _prompt(options)
    static = both(lambda mode: _static(mode, prompt))

    def adaptive(mode: Mode, target_s: float) -> tuple[float, float]:
        found = adaptive_prefill(machine("h100", "llama-3-8b", 8, 1, mode), prompt, target_s)
        return found.ttft_s, found.worst_s

    def gains(mode: Mode) -> dict[str, float]:
        """Return static TTFT over adaptive TTFT, the target of the latter being the static chunk's worst iteration."""

        return {str(c): ttft / adaptive(mode, worst)[0] for c, (ttft, worst) in static[mode].items() if c >= 64}

    curve = {mode: [adaptive(mode, t) for t in TARGETS_S] for mode in MODES}
    middle = both(lambda mode: gains(mode))
    rows = [
        judge(
            "At the same worst iteration adaptive chunks finish sooner: static TTFT over adaptive, by static chunk",
            "adaptive dominates",
            order("at least 1 at every chunk", lambda found: min(found.values()) >= 1 - 1e-6),
            middle,
        ),
        judge(
            "Static chunks trade: TTFT falls as chunks grow, seconds",
            "falls",
            descending("falls"),
            both(lambda mode: {str(c): static[mode][c][0] for c in CHUNKS}),
        ),
        judge(
            "Adaptive at 50 ms: TTFT over that of static 4096 chunks",
            "high prefill efficiency at low decode latency",
            at_most(1.15),
            both(lambda mode: curve[mode][2][0] / static[mode][4096][0]),
        ),
    ]
    return _report(rows, static, curve, prompt)


def mnemosyne(options: RunOptions) -> ExperimentReport:
    """Reproduce Mnemosyne Fig. 8 and the 1.75× of §4.2."""
    prompt = _prompt(options)
    report = medha(options)
    return ExperimentReport(source=report.source, rows=(slowdown(prompt), *report.rows), panels=report.panels)


def slowdown(prompt: int = PROMPT) -> ClaimRow:
    """Return the row of chunks of 32 against 4096, end to end."""

    def ratio(mode: Mode) -> float:
        static = _static(mode, prompt)
        return static[32][0] / static[4096][0]

    return judge(
        "8B on 8 H100s: prefill of 1M tokens in chunks of 32 over chunks of 4096",
        "1.75×",
        band(1.5, 2.0),
        both(ratio),
        "A chunk of 32 pays the launch of every layer's kernels, and reads weights and KV, for few rows.",
    )


def _report(
    rows: list[ClaimRow],
    static: dict[Mode, dict[int, tuple[float, float]]],
    curve: dict[Mode, list[tuple[float, float]]],
    prompt: int,
) -> ExperimentReport:
    panels = tuple(
        ReportChart(
            title=f"Prefill of {prompt:,} tokens, {mode} mode",
            x="worst iteration, s",
            y="TTFT, s",
            log_x=True,
            lines={
                "static 32 to 4096": [(worst, ttft) for ttft, worst in static[mode].values()],
                "adaptive 20 to 200 ms": [(worst, ttft) for ttft, worst in curve[mode]],
            },
        )
        for mode in MODES
    )
    machines = [machine("h100", "llama-3-8b", 8, 1, mode) for mode in MODES]
    scenario = f"Llama-3 8B, 8 H100 (TP8), a lone prompt of {prompt:,} tokens"
    return ExperimentReport(source=latency_source(*machines, scenario=scenario), rows=tuple(rows), panels=panels)
