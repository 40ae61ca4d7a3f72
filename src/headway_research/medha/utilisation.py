"""Model FLOPs and bandwidth utilisation: Medha Figs. 15 and 16 (Mnemosyne Figs. 20 and 21).

MFU of a lone prefill in chunks of 4096, MBU of a lone decode. Which FLOPs of attention the papers' MFU counts is not
said: causal, or whole (4·n²·d·h_q, Mnemosyne Eq. 1, as their 2.4 and 2.8 ExaFLOP for 1M tokens of 70B are). Each row
shows both, with the kernel that the papers had (`arithmetic`): between them lies the range.
"""

from __future__ import annotations

from headway.sim.report.page import ReportChart
from headway_research.base import ClaimRow, ExperimentReport, Mode, RunOptions
from headway_research.medha.arithmetic import PAPER_KERNEL, latency_source, machine, prefill_flops, static_prefill
from headway_research.verdicts import at_least, both, judge, only, order, share_of_peak

CONTEXTS = (1_000_000, 2_000_000, 4_000_000)
NODES = (1, 4, 16)
CHUNK = 4096
CIRCULAR = (
    "Circular: FLOPs over our own extrapolated times (histories end at 12,416 tokens), so no evidence for these times."
)
COUNTS = ("causal", "whole")


def mfu(name: str, stages: int, context: int, count: str, mode: Mode = "paper") -> float:
    """Return the model FLOPs of a prefill over peak. count: of `COUNTS`. mode: of the times."""
    m = machine("h100", name, 8, stages, mode)
    flops = prefill_flops(m.shape, context)
    if count == "whole":
        # whole attention is twice the causal count
        flops += m.shape.attention_flops(context, 0)
    return flops / (static_prefill(m, context, CHUNK).ttft_s * m.device.flops * m.layout.accelerators)


def mbu(name: str, context: int, groups: int, mode: Mode) -> float:
    """Return the bytes of weights (once a group) and KV that a decode reads in one TBT, over peak; one stage."""
    m = machine("h100", name, 8, 1, mode)
    # every KV group has its own copy of the weights
    read = groups * m.shape.parameters * m.shape.dtype_bytes + context * m.shape.kv_bytes_per_token
    return read / (m.tbt_s(context, groups=groups) * m.device.bandwidth * m.layout.accelerators * groups)


def prefill(options: RunOptions) -> ExperimentReport:
    """Reproduce Medha Fig. 15."""
    claims = [(4, 1_000_000), (4, 2_000_000), (16, 1_000_000), (16, 4_000_000)]

    def counts(n: int, c: int) -> dict[str, float]:
        return {count: mfu("llama-3-70b", n, c, count) for count in COUNTS}

    def spanned(found: dict[str, float]) -> bool:
        return found["causal"] <= 0.5 and 0.6 <= found["whole"] <= 1.0

    rows = [
        judge(
            f"llama-3-70b, {c // 1_000_000}M tokens on {8 * n} H100s: MFU, attention counted causal and whole",
            "50-60% (which count is not said)",
            order("50 to 60% lie between the two counts, both possible", spanned),
            only("paper", counts(n, c)),
            f"{PAPER_KERNEL}. With FlashAttention-3 {mfu('llama-3-70b', n, c, 'causal', 'default'):.2f} causal, and "
            f"{mfu('llama-3-70b', n, c, 'whole', 'default'):.2f} whole, which is impossible. {CIRCULAR}",
            approximate=True,
        )
        for n, c in claims
    ]
    rows.append(
        judge(
            "llama-3-70b, 128 H100s: MFU counted whole, the worst of 1M to 4M tokens",
            "> 50%",
            share_of_peak(0.5),
            only("paper", min(mfu("llama-3-70b", 16, c, "whole") for c in CONTEXTS)),
            CIRCULAR,
            approximate=True,
        )
    )
    lines = {
        f"{name}, {c // 1_000_000}M": [(float(8 * n), mfu(name, n, c, "causal")) for n in NODES]
        for name in ("llama-3-8b", "llama-3-70b")
        for c in CONTEXTS[:2]
    }
    panel = ReportChart(title="MFU of a prefill, causal count", x="H100s", y="MFU", lines=lines, log_x=True)
    return _report(rows, panel)


def decode(options: RunOptions) -> ExperimentReport:
    """Reproduce Medha Fig. 16."""
    groups = (1, 2, 4)
    lines = {
        f"{name}, 10M": [(float(8 * k), mbu(name, 10_000_000, k, "default")) for k in groups]
        for name in ("llama-3-8b", "llama-3-70b")
    }
    rows = [
        judge(
            "MBU of a decode, the best of 1, 2, 4 KV groups and 1M to 10M tokens (8B, TP8)",
            "up to 92%",
            share_of_peak(0.85, 0.97),
            both(lambda mode: max(mbu("llama-3-8b", c, k, mode) for c in (1_000_000, 10_000_000) for k in groups)),
            "In the public profile large reads of KV reach 0.93 of the data sheet's bandwidth.",
        ),
        judge(
            "Utilisation falls as KV groups grow (8B, 1M tokens): MBU at 1 over MBU at 4",
            "falls",
            at_least(1.0),
            both(lambda mode: mbu("llama-3-8b", 1_000_000, 1, mode) / mbu("llama-3-8b", 1_000_000, 4, mode)),
        ),
    ]
    return _report(rows, ReportChart(title="MBU of a decode", x="H100s", y="MBU", lines=lines))


def _report(rows: list[ClaimRow], panel: ReportChart) -> ExperimentReport:
    machines = [machine("h100", "llama-3-70b", 8, n, "default") for n in NODES]
    scenario = f"H100, TP8, 1 to 16 stages; lone prefill in chunks of {CHUNK}, lone decode"
    return ExperimentReport(source=latency_source(*machines, scenario=scenario), rows=tuple(rows), panels=(panel,))
