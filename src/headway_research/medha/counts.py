"""What needs no times: FLOPs and bytes by model shapes and data sheets, and the headline numbers of Mnemosyne.

Medha Eq. 1 (Mnemosyne Eq. 7): I = c · h_q / h_kv whatever the context, and the 40 tokens that saturate an H100. The
equation is the limit of a chunk that is short against its history, so our count at 1M tokens exceeds it by the chunk's
own half, c / 2M. Saturation: the chunk at which the intensity reaches the data sheet's FLOPs per byte; kernels that
reach less of one than of the other move it.

Mnemosyne Fig. 5: resources for a 30 s TTFT and a 20 ms TBT, Llama-3 8B on H100s, at full utilisation. paper mode: the
printed Eq. 1, 4·n²·d·h_q a layer (attention not counted as causal), plus matrix products, contexts of 2^20 tokens.
default mode: causal attention. Bandwidth: KV read within the TBT; capacity: weights and KV. The two halves of the
figure do not agree: 768K on 8 GPUs lies between both counts, 20 and 80 GPUs follow from the printed one.

Headlines: 1.75× at chunks of 32, 30 ms TBT at 10M tokens (served by KV groups), 30 s TTFT at 2M; 2.4 ExaFLOP, 320 GB.
"""

from __future__ import annotations

import math
from functools import partial

from headway.perf.hardware import accelerator, model
from headway.sim.report.page import ReportChart
from headway_research.base import MODES, ExperimentReport, Mode, RunOptions, source
from headway_research.medha.arithmetic import lone_report, machine, prefill_flops
from headway_research.medha.kvp import tbt_s
from headway_research.medha.lone_prefill import PROMPT, slowdown
from headway_research.medha.pipelines import within_30s
from headway_research.verdicts import at_most, band, exact, judge, judge_same, order

CHUNKS = (16, 32, 40, 64, 128, 512, 2048)
DEVICE, SHAPE = accelerator("h100"), model("llama-3-8b")
TTFT_S, TBT_S = 30.0, 0.020
MI = 1 << 20


def intensity(name: str, chunk: int, past: int) -> float:
    """Return the FLOPs of a chunk's attention over `past` tokens for each byte of KV that it reads."""
    shape = model(name)
    # without the chunk's attention over itself: the equation counts the history only
    flops = shape.attention_flops(chunk, past) - shape.attention_flops(chunk, 0)
    return flops / (shape.kv_bytes_per_token * past)


def eq1(options: RunOptions) -> ExperimentReport:
    """Reproduce Medha Eq. 1."""
    rows, found = [], {}
    for name in ("llama-3-8b", "llama-3-70b"):
        expected = {str(c): float(c * model(name).q_heads // model(name).kv_heads) for c in CHUNKS}
        found[name] = {c: intensity(name, c, 1_000_000) for c in CHUNKS}
        claim = f"{name}: arithmetic intensity by chunk over 1M tokens is c·h_q/h_kv"
        rows.append(judge_same(claim, expected, exact(expected), {str(c): each for c, each in found[name].items()}))
    spread = intensity("llama-3-70b", 64, 10_000_000) - intensity("llama-3-70b", 64, 10_000)
    rows.append(judge_same("Intensity does not depend on the context (10M less 10K tokens)", 0.0, exact(0.0), spread))
    large = model("llama-3-70b")
    rows.append(
        judge_same(
            "Chunks of ~40 tokens saturate an H100's arithmetic (Llama-3 70B)",
            "~40",
            band(32, 48),
            # Eq. 1 solved for c at the device's FLOPs per byte
            DEVICE.flops / DEVICE.bandwidth / (large.q_heads / large.kv_heads),
            "Data-sheet peak over data-sheet bandwidth: 295 FLOPs a byte, eight query heads a KV head.",
        )
    )
    lines = {name: [(float(c), value) for c, value in by_chunk.items()] for name, by_chunk in found.items()}
    panel = ReportChart(title="Intensity of chunked attention", x="chunk, tokens", y="FLOPs a byte", lines=lines,
                        log_x=True, log_y=True)  # fmt: skip
    origin = source("none: counted from model shapes and data sheets", "Llama-3 8B and 70B")
    return ExperimentReport(source=origin, rows=tuple(rows), panels=(panel,))


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


def mnemosyne_fig5(options: RunOptions) -> ExperimentReport:
    """Reproduce Mnemosyne Fig. 5."""
    rows = (
        judge("GPUs for 1M tokens within 30 s", 20, band(19, 21), partial(gpus_for, MI)),
        judge("GPUs for 2M tokens within 30 s", 80, band(76, 84), partial(gpus_for, 2 * MI)),
        judge(
            "Longest context that 8 H100s prefill within 30 s, tokens",
            "768K",
            band(0.95 * 768 * 1024, 1.05 * 768 * 1024),
            lambda mode: most_tokens(8, mode)["compute"],
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
            partial(most_tokens, 8),
        ),
    )
    lines = {f"{mode} count": [(float(n), float(gpus_for(n * MI, mode))) for n in (1, 2, 4, 8)] for mode in MODES}
    panel = ReportChart(
        title="GPUs for a 30 s TTFT, Llama-3 8B", x="context, Mi tokens", y="H100s", lines=lines, log_y=True
    )
    origin = source(
        "none: data sheet at full utilisation",
        "Llama-3 8B, H100, 30 s TTFT and 20 ms TBT",
        modes="paper: attention counted whole, as printed; default: causal",
    )
    return ExperimentReport(source=origin, rows=rows, panels=(panel,))


def mnemosyne_headlines(options: RunOptions) -> ExperimentReport:
    """Reproduce Mnemosyne's headline numbers."""
    large = model("llama-3-70b")

    def exaflop(mode: Mode) -> float:
        whole = large.attention_flops(PROMPT, 0) if mode == "paper" else 0.0
        return (prefill_flops(large, PROMPT) + whole) / 1e18

    rows = (
        slowdown(200_000 if options.quick else PROMPT),
        judge(
            "8B, 10M tokens, 4 KV groups on 128 H100s: TBT, seconds",
            "<= 0.030",
            at_most(0.030),
            partial(tbt_s, "llama-3-8b", 10_000_000, 4),
        ),
        within_30s(),
        judge(
            "70B, 1M tokens: ExaFLOP of a prefill",
            "2.4 (Medha: 2.8)",
            band(2.3, 2.9),
            exaflop,
            "paper mode counts attention whole, as the papers' equation does; default mode counts it causal.",
        ),
        judge_same("70B, 1M tokens: KV cache, GB", 320, band(310, 330), large.kv_bytes_per_token * PROMPT / 1e9),
    )
    machines = [machine("llama-3-8b", stages, mode) for stages in (1, 4, 16) for mode in MODES]
    return lone_report("Llama-3 8B (and 70B's counts), up to 128 H100s", machines, rows)
