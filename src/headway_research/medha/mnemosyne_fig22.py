"""Mnemosyne Fig. 22: decodes beside a chunk of a 1M prefill, Llama-3 8B on 8 H100s: batch time by chunk and batch.

Every decode has 1K tokens; the chunk is over the last 5% of the prompt (its P95 iteration).
"""

from __future__ import annotations

from headway.sim.report.page import ReportChart
from headway_research.base import MODES, ExperimentReport, Mode, RunOptions
from headway_research.medha.arithmetic import latency_source, machine
from headway_research.verdicts import ascending, at_most, both, judge

CHUNKS = (32, 64, 128, 256, 512)
BATCHES = (1, 8, 32, 64, 128)
PAST, CONTEXT = 950_000, 1_000


def seconds(chunk: int, decodes: int, mode: Mode) -> float:
    """One iteration."""
    return machine("h100", "llama-3-8b", 8, 1, mode).chunk_s(PAST, chunk, decodes, decodes * CONTEXT)


def run(options: RunOptions) -> ExperimentReport:
    """See the module."""

    def growth(mode: Mode) -> dict[str, float]:
        return {str(c): seconds(c, 128, mode) / seconds(c, 0, mode) - 1.0 for c in CHUNKS}

    found = both(growth)
    rows = [
        judge(
            "128 decodes add to a batch at most (the worst chunk size), relative",
            "at most 5%",
            at_most(0.05),
            {mode: max(found[mode].values()) for mode in MODES},
            f"By chunk, default mode: {', '.join(f'{c}: {v:+.0%}' for c, v in found['default'].items())}. The smaller "
            "the chunk, the more the rows of the decodes weigh.",
        ),
        judge(
            "128 decodes add to a batch with a chunk of 512, relative",
            "at most 5%",
            at_most(0.05),
            {mode: found[mode]["512"] for mode in MODES},
        ),
        judge(
            "Batch time by chunk, 128 decodes, seconds",
            "rises",
            ascending("rises"),
            both(lambda mode: {str(c): seconds(c, 128, mode) for c in CHUNKS}),
        ),
    ]
    lines = {
        f"chunk {c}": [(0.0, seconds(c, 0, "default")), *((float(n), seconds(c, n, "default")) for n in BATCHES)]
        for c in CHUNKS
    }
    panel = ReportChart(title="Batch time, default mode", x="decodes of 1K tokens", y="seconds", lines=lines)
    machines = [machine("h100", "llama-3-8b", 8, 1, mode) for mode in MODES]
    scenario = f"Llama-3 8B, 8 H100 (TP8), chunk over {PAST:,} tokens beside decodes of {CONTEXT:,}"
    return ExperimentReport(source=latency_source(*machines, scenario=scenario), rows=tuple(rows), panels=(panel,))
