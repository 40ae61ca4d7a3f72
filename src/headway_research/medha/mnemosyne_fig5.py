"""Mnemosyne Fig. 5: resources for a 30 s TTFT and a 20 ms TBT, Llama-3 8B on H100s, at full utilisation.

paper mode: the printed Eq. 1, 4·n²·d·h_q a layer (attention not counted as causal), plus matrix products, contexts of
2^20 tokens. default mode: causal attention. Bandwidth: KV read within the TBT; capacity: weights and KV. The two halves
of the figure do not agree: 768K on 8 GPUs lies between both counts, 20 and 80 GPUs follow from the printed one.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from headway.perf.hardware import accelerator, model
from headway.sim.report.page import ReportChart
from headway_research.base import ExperimentReport, Mode, RunOptions
from headway_research.verdicts import at_most, band, both, judge, judge_same, order

DEVICE, SHAPE = accelerator("h100"), model("llama-3-8b")
TTFT_S, TBT_S = 30.0, 0.020
MI = 1 << 20


def flops(tokens: int, mode: Mode) -> float:
    """Return the FLOPs of a prefill; paper mode counts attention whole, twice the causal count."""
    times = 2.0 if mode == "paper" else 1.0
    return SHAPE.linear_flops(tokens) + times * SHAPE.attention_flops(tokens, 0)


def gpus_for(tokens: int, mode: Mode) -> int:
    """Return the number of devices whose peak FLOP/s suffice for the TTFT."""
    return math.ceil(flops(tokens, mode) / (TTFT_S * DEVICE.flops))


def most_tokens(gpus: int, mode: Mode) -> dict[str, int]:
    """Return the longest context by resource: compute for the TTFT, bandwidth for the TBT, memory capacity."""
    low, high = 1, 1 << 26
    # FLOPs have no closed inverse here: bisect for the largest prompt within the TTFT
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if flops(middle, mode) <= gpus * TTFT_S * DEVICE.flops else (low, middle - 1)
    weights = SHAPE.parameters * SHAPE.dtype_bytes
    bandwidth = (gpus * DEVICE.bandwidth * TBT_S - weights) / SHAPE.kv_bytes_per_token
    capacity = (gpus * DEVICE.capacity - weights) / SHAPE.kv_bytes_per_token
    return {"compute": low, "bandwidth": int(bandwidth), "capacity": int(capacity)}


def run(options: RunOptions) -> ExperimentReport:
    """See the module."""
    rows = [
        judge("GPUs for 1M tokens within 30 s", 20, band(19, 21), both(partial(gpus_for, MI))),
        judge("GPUs for 2M tokens within 30 s", 80, band(76, 84), both(partial(gpus_for, 2 * MI))),
        judge(
            "Longest context that 8 H100s prefill within 30 s, tokens",
            "768K",
            band(0.95 * 768 * 1024, 1.05 * 768 * 1024),
            both(lambda mode: most_tokens(8, mode)["compute"]),
            "8 of the 20 GPUs that the figure itself needs for 1M leave 650K by its own square law.",
        ),
        judge_same(
            "Tokens that 8 of the figure's own 20 GPUs prefill in the same time, by the square law, in Ki",
            None,
            at_most(0.9 * 768),
            1024 * math.sqrt(8 / 20),
            "Attention grows with the square of the tokens: 768K and 20 GPUs cannot both hold.",
        ),
        judge(
            "Compute is the first bottleneck on 8 H100s, capacity the last: longest context by resource",
            "compute < bandwidth < capacity",
            order("compute least, capacity most", lambda f: f["compute"] < f["bandwidth"] < f["capacity"]),
            both(partial(most_tokens, 8)),
        ),
    ]
    lines = {f"{mode} count": [(float(n), float(gpus_for(n * MI, mode))) for n in (1, 2, 4, 8)] for mode in _modes()}
    panel = ReportChart(
        title="GPUs for a 30 s TTFT, Llama-3 8B", x="context, Mi tokens", y="H100s", lines=lines, log_y=True
    )
    source: dict[str, Any] = {
        "latency": "none: data sheet at full utilisation",
        "scenario": "Llama-3 8B, H100, 30 s TTFT and 20 ms TBT",
        "modes": "paper: attention counted whole, as printed; default: causal",
        "seeds": [],
        "window_s": None,
    }
    return ExperimentReport(source=source, rows=tuple(rows), panels=(panel,))


def _modes() -> tuple[Mode, Mode]:
    return "paper", "default"
