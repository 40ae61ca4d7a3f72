"""Mnemosyne Fig. 13: tensor parallelism alone against vLLM as contexts grow, Llama-3 8B on 8 H100s.

The baseline is vLLM as of 2024, whose overhead an iteration is not published; §5 lays the difference to it (one central
scheduler, page tables copied each iteration, no graphs for mixed batches). So the rows derive that overhead from the
paper's two ratios over our own times: if one overhead explains both, they agree.
"""

from __future__ import annotations

from headway.sim.report.page import ReportChart
from headway_research.base import MODES, ExperimentReport, Mode, RunOptions
from headway_research.medha.arithmetic import latency_source, machine, static_prefill
from headway_research.verdicts import band, both, descending, judge

CONTEXTS = (128_000, 256_000, 512_000, 1_000_000)
DECODE_GAIN, PREFILL_GAIN = 3.8, 6.0
CHUNK = 32
"""Tokens of a "small chunk"; the figure does not say how small."""


def tbt_s(context: int, mode: Mode) -> float:
    """Return the TBT of one decode on TP8."""
    return machine("h100", "llama-3-8b", 8, 1, mode).tbt_s(context)


def iteration_s(context: int, mode: Mode) -> float:
    """Return the mean seconds of an iteration of a prefill in small chunks."""
    found = static_prefill(machine("h100", "llama-3-8b", 8, 1, mode), context, CHUNK)
    return found.ttft_s / (context / CHUNK)


def decode_overhead_s(context: int, mode: Mode) -> float:
    """Return vLLM's overhead an iteration that the decode's ratio implies."""
    return (DECODE_GAIN - 1) * tbt_s(context, mode)


def prefill_overhead_s(context: int, mode: Mode) -> float:
    """Return vLLM's overhead an iteration that the prefill's ratio implies."""
    return (PREFILL_GAIN - 1) * iteration_s(context, mode)


def run(options: RunOptions) -> ExperimentReport:
    """See the module."""

    def agreement(mode: Mode) -> float:
        return prefill_overhead_s(CONTEXTS[-1], mode) / decode_overhead_s(CONTEXTS[-1], mode)

    def gains(mode: Mode) -> dict[str, float]:
        # the overhead that 3.8 implies at the longest context, at all of them
        overhead_s = decode_overhead_s(CONTEXTS[-1], mode)
        return {f"{context // 1000}K": 1 + overhead_s / tbt_s(context, mode) for context in CONTEXTS}

    implied = ", ".join(f"{decode_overhead_s(c, 'default') * 1e3:.1f} ms at {c // 1000}K" for c in CONTEXTS)
    rows = (
        judge(
            "Overhead of vLLM an iteration: implied by the prefill's ~6× over that by the decode's 3.8×, 1M tokens",
            "one cause for both: CPU overheads (§5)",
            band(0.5, 2.0),
            both(agreement),
            f"By the decode's 3.8×: {implied}.",
        ),
        judge(
            "TBT of vLLM over tensor parallelism alone by context, were its overhead the same at each",
            None,
            descending("falls"),
            both(gains),
            "The paper's overhead grows with the context (page tables), which keeps the ratio.",
        ),
    )
    lines = {f"{mode} mode": [(float(c), tbt_s(c, mode)) for c in CONTEXTS] for mode in MODES}
    panel = ReportChart(title="Decode, tensor parallelism alone", x="tokens", y="TBT, s", lines=lines, log_x=True)
    machines = [machine("h100", "llama-3-8b", 8, 1, mode) for mode in MODES]
    scenario = f"Llama-3 8B, 8 H100s (TP8), contexts of 128K to 1M, prefill in chunks of {CHUNK}"
    return ExperimentReport(source=latency_source(*machines, scenario=scenario), rows=rows, panels=(panel,))
