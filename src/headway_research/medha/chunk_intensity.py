"""Medha Eq. 1 (Mnemosyne Eq. 7): I = c · h_q / h_kv whatever the context, and the 40 tokens that saturate an H100.

FLOPs and bytes are counted by `ModelShape`; the equation is the limit of a chunk that is short against its history, so
our count at 1M tokens exceeds it by the chunk's own half, c / 2M. Saturation: the chunk at which the intensity reaches
the data sheet's FLOPs per byte; kernels that reach less of one than of the other move it.
"""

from __future__ import annotations

from typing import Any

from headway.perf.hardware import accelerator, model
from headway.sim.report.page import ReportChart
from headway_research.base import ExperimentReport, Mode, RunOptions
from headway_research.verdicts import band, both, exact, judge

CHUNKS = (16, 32, 40, 64, 128, 512, 2048)


def intensity(name: str, chunk: int, past: int) -> float:
    """Return the FLOPs of a chunk's attention over `past` tokens for each byte of KV that it reads."""
    shape = model(name)
    # without the chunk's attention over itself: the equation counts the history only
    flops = shape.attention_flops(chunk, past) - shape.attention_flops(chunk, 0)
    return flops / (shape.kv_bytes_per_token * past)


def run(options: RunOptions) -> ExperimentReport:
    """See the module."""
    rows = []
    for name in ("llama-3-8b", "llama-3-70b"):
        shape = model(name)
        expected = {str(c): float(c * shape.q_heads // shape.kv_heads) for c in CHUNKS}
        found = {str(c): intensity(name, c, 1_000_000) for c in CHUNKS}
        ours: dict[Mode, Any] = {"paper": found, "default": found}
        claim = f"{name}: arithmetic intensity by chunk over 1M tokens is c·h_q/h_kv"
        rows.append(judge(claim, expected, exact(expected), ours))
    spread = intensity("llama-3-70b", 64, 10_000_000) - intensity("llama-3-70b", 64, 10_000)
    rows.append(
        judge("Intensity does not depend on the context (10M less 10K tokens)", 0.0, exact(0.0), both(lambda _: spread))
    )
    device, shape = accelerator("h100"), model("llama-3-70b")
    # Eq. 1 solved for c at the device's FLOPs per byte
    knee = device.flops / device.bandwidth / (shape.q_heads / shape.kv_heads)
    rows.append(
        judge(
            "Chunks of ~40 tokens saturate an H100's arithmetic (Llama-3 70B)",
            "~40",
            band(32, 48),
            both(lambda _: knee),
            "Data-sheet peak over data-sheet bandwidth: 295 FLOPs a byte, eight query heads a KV head.",
        )
    )
    lines = {
        name: [(float(c), intensity(name, c, 1_000_000)) for c in CHUNKS] for name in ("llama-3-8b", "llama-3-70b")
    }
    panel = ReportChart(title="Intensity of chunked attention", x="chunk, tokens", y="FLOPs a byte", lines=lines,
                  log_x=True, log_y=True)  # fmt: skip
    source: dict[str, Any] = {
        "latency": "none: counted from model shapes and data sheets",
        "scenario": "Llama-3 8B and 70B",
        "seeds": [],
        "window_s": None,
    }
    return ExperimentReport(source=source, rows=tuple(rows), panels=(panel,))
