"""A prefill alone, and decodes beside one, on eight H100s (TP8, one stage): times by chunk, all by arithmetic.

Medha Fig. 3b and Mnemosyne Fig. 7: attention time of a prefill of 1M tokens by chunk size, Llama-3 70B. Only attention
is counted. The papers measured FlashInfer and FlashAttention-2; the fit is of public profiles with histories of at most
12K tokens, so that the total is an extrapolation.

Medha Fig. 4 and Mnemosyne Fig. 8: static chunks against adaptive ones, Llama-3 8B: time to the first token over the
worst iteration, the wait of a decode in the same batches. Adaptive: the largest chunk within a time.

Mnemosyne Fig. 22: decodes of 1K tokens beside a chunk over the last 5% of the prompt (its P95 iteration).

Mnemosyne Fig. 13: tensor parallelism alone against vLLM as contexts grow. The baseline is vLLM as of 2024, whose
overhead an iteration is not published; §5 lays the difference to it (one central scheduler, page tables copied each
iteration, no graphs for mixed batches). So the rows derive that overhead from the paper's two ratios over our own
times: if one overhead explains both, they agree.
"""

from __future__ import annotations

import numpy as np

from headway.sim.report.page import ReportChart
from headway_research.base import MODES, ClaimRow, ExperimentReport, Mode, RunOptions
from headway_research.medha.arithmetic import InstanceModel, adaptive_prefill, lone_report, machine, static_prefill
from headway_research.verdicts import ascending, at_most, band, both, descending, judge, order

PROMPT = 1_000_000
SMALL = "llama-3-8b"
PAST, DECODES, CONTEXT = 950_000, (1, 8, 32, 64, 128), 1_000


def of_small(mode: Mode) -> InstanceModel:
    """Return Llama-3 8B on eight H100s."""
    return machine(SMALL, 1, mode)


# -- attention by chunk: Medha Fig. 3b, Mnemosyne Fig. 7 --------------------------------------------------------------


def attention_s(m: InstanceModel, chunk: int, prompt: int = PROMPT) -> float:
    """Return the seconds of attention over all chunks of the prompt, on one stage."""
    starts = np.arange(0, prompt, chunk)
    # 200 chunks are computed, the others interpolated: a chunk's attention is close to linear in its history
    at = np.unique(np.linspace(0, starts.size - 1, 200).astype(int)) * chunk
    seconds = np.array([m.latency.attention_s(int(past), chunk) for past in at])
    return float(np.interp(starts, at, seconds).sum())


class AttentionByChunk:
    """Attention of a whole prefill by chunk size, Llama-3 70B."""

    chunks = (32, 64, 128, 256, 512, 1024, 2048)

    def __init__(self) -> None:
        self.machines = {mode: machine("llama-3-70b", 1, mode) for mode in MODES}
        self.times = {mode: {c: attention_s(m, c) for c in self.chunks} for mode, m in self.machines.items()}

    def over(self, chunk: int, mode: Mode) -> float:
        """Return the relative overhead over chunks of 2,048 tokens, the largest in the figures."""
        return self.times[mode][chunk] / self.times[mode][2048] - 1.0

    def report(self, *rows: ClaimRow) -> ExperimentReport:
        lines = {f"{mode} mode": [(float(c), s) for c, s in found.items()] for mode, found in self.times.items()}
        panel = ReportChart(title="Attention of a 1M prefill", x="chunk, tokens", y="seconds", lines=lines, log_x=True)
        scenario = f"Llama-3 70B, 8 H100 (TP8), prompt of {PROMPT:,}, chunks {self.chunks}"
        return lone_report(scenario, self.machines.values(), rows, panel)


def attention_medha(options: RunOptions) -> ExperimentReport:
    """Fig. 3b: 32-token chunks cost 11% more than 2048-token ones."""
    found = AttentionByChunk()
    return found.report(
        judge(
            "Attention of 32-token chunks over 2048-token ones, relative overhead",
            "+11%",
            band(0.05, 0.20),
            lambda mode: found.over(32, mode),
            "By the fit a chunk of 32 is bound by reading its KV at 0.93 of the data sheet's bandwidth, which is what "
            "long decodes reach in the public profile; a pure roofline gives 0% down to 24 tokens and 49% at 16.",
        ),
        judge(
            "Chunks of about 40 tokens saturate (64 tokens against 2048, relative overhead)",
            "near-optimal",
            at_most(0.15),
            lambda mode: found.over(64, mode),
        ),
    )


def attention_mnemosyne(options: RunOptions) -> ExperimentReport:
    """Fig. 7: chunks of 32 to 128 tokens only incur marginal overhead."""
    found = AttentionByChunk()
    over = both(lambda mode: {str(c): found.over(c, mode) for c in (32, 64, 128)})
    return found.report(
        judge(
            "Chunks of 32 to 128 tokens incur marginal overhead over larger ones (worst of them)",
            "marginal, +11% at 32",
            at_most(0.20),
            lambda mode: max(over[mode].values()),
            f"By chunk, paper mode: {', '.join(f'{c}: {v:+.0%}' for c, v in over['paper'].items())}.",
        ),
        judge(
            "Overhead falls as chunks grow",
            "falls",
            order("falls from 32 over 64 to 128", lambda v: v["32"] >= v["64"] >= v["128"]),
            over,
        ),
    )


# -- static and adaptive chunks: Medha Fig. 4, Mnemosyne Fig. 8 -------------------------------------------------------


class ChunkFront:
    """(TTFT, worst iteration) of a lone prompt of Llama-3 8B in static chunks, and in adaptive ones by target."""

    chunks = (32, 64, 128, 256, 512, 1024, 2048, 4096)
    targets_s = (0.02, 0.03, 0.05, 0.1, 0.2)

    def __init__(self, quick: bool) -> None:
        self.prompt = 200_000 if quick else PROMPT
        self.static = both(lambda mode: {chunk: self._static(chunk, mode) for chunk in self.chunks})
        self.curve = both(lambda mode: [self.adaptive(target_s, mode) for target_s in self.targets_s])

    def _static(self, chunk: int, mode: Mode) -> tuple[float, float]:
        found = static_prefill(of_small(mode), self.prompt, chunk)
        return found.ttft_s, found.worst_s

    def adaptive(self, target_s: float, mode: Mode) -> tuple[float, float]:
        found = adaptive_prefill(of_small(mode), self.prompt, target_s)
        return found.ttft_s, found.worst_s

    def gains(self, mode: Mode) -> dict[str, float]:
        """Return static TTFT over adaptive TTFT, the target of the latter being the static chunk's worst iteration."""
        found = {c: at for c, at in self.static[mode].items() if c >= 64}
        return {str(c): ttft / self.adaptive(worst, mode)[0] for c, (ttft, worst) in found.items()}

    def report(self, *rows: ClaimRow) -> ExperimentReport:
        panels = (
            ReportChart(
                title=f"Prefill of {self.prompt:,} tokens, {mode} mode",
                x="worst iteration, s",
                y="TTFT, s",
                log_x=True,
                lines={
                    "static 32 to 4096": [(worst, ttft) for ttft, worst in self.static[mode].values()],
                    "adaptive 20 to 200 ms": [(worst, ttft) for ttft, worst in self.curve[mode]],
                },
            )
            for mode in MODES
        )
        scenario = f"Llama-3 8B, 8 H100 (TP8), a lone prompt of {self.prompt:,} tokens"
        return lone_report(scenario, map(of_small, MODES), (*rows, *self._rows()), *panels)

    def _rows(self) -> list[ClaimRow]:
        return [
            judge(
                "At the same worst iteration adaptive chunks finish sooner: static TTFT over adaptive, by static chunk",
                "adaptive dominates",
                order("at least 1 at every chunk", lambda found: min(found.values()) >= 1 - 1e-6),
                self.gains,
            ),
            judge(
                "Static chunks trade: TTFT falls as chunks grow, seconds",
                "falls",
                descending("falls"),
                lambda mode: {str(c): ttft for c, (ttft, _) in self.static[mode].items()},
            ),
            judge(
                "Adaptive at 50 ms: TTFT over that of static 4096 chunks",
                "high prefill efficiency at low decode latency",
                at_most(1.15),
                lambda mode: self.curve[mode][2][0] / self.static[mode][4096][0],
            ),
        ]


def front_medha(options: RunOptions) -> ExperimentReport:
    """Reproduce Medha Fig. 4: adaptive chunking is on the Pareto front of TTFT and worst iteration."""
    return ChunkFront(options.quick).report()


def front_mnemosyne(options: RunOptions) -> ExperimentReport:
    """Reproduce Mnemosyne Fig. 8 and the 1.75× of §4.2."""
    found = ChunkFront(options.quick)
    return found.report(slowdown(found.prompt))


def slowdown(prompt: int = PROMPT) -> ClaimRow:
    """Return the row of chunks of 32 against 4096, end to end."""

    def ttft_s(chunk: int, mode: Mode) -> float:
        return static_prefill(of_small(mode), prompt, chunk).ttft_s

    return judge(
        "8B on 8 H100s: prefill of 1M tokens in chunks of 32 over chunks of 4096",
        "1.75×",
        band(1.5, 2.0),
        lambda mode: ttft_s(32, mode) / ttft_s(4096, mode),
        "A chunk of 32 pays the launch of every layer's kernels, and reads weights and KV, for few rows.",
    )


# -- decodes: Mnemosyne Figs. 22 and 13 -------------------------------------------------------------------------------


def beside_decodes(options: RunOptions) -> ExperimentReport:
    """Reproduce Mnemosyne Fig. 22: batch time by chunk and number of decodes."""
    chunks = (32, 64, 128, 256, 512)

    def seconds(chunk: int, decodes: int, mode: Mode) -> float:
        return of_small(mode).chunk_s(PAST, chunk, decodes, decodes * CONTEXT)

    growth = both(lambda mode: {str(c): seconds(c, 128, mode) / seconds(c, 0, mode) - 1.0 for c in chunks})
    rows = (
        judge(
            "128 decodes add to a batch at most (the worst chunk size), relative",
            "at most 5%",
            at_most(0.05),
            lambda mode: max(growth[mode].values()),
            f"By chunk, default mode: {', '.join(f'{c}: {v:+.0%}' for c, v in growth['default'].items())}. The smaller "
            "the chunk, the more the rows of the decodes weigh.",
        ),
        judge(
            "128 decodes add to a batch with a chunk of 512, relative",
            "at most 5%",
            at_most(0.05),
            lambda mode: growth[mode]["512"],
        ),
        judge(
            "Batch time by chunk, 128 decodes, seconds",
            "rises",
            ascending("rises"),
            lambda mode: {str(c): seconds(c, 128, mode) for c in chunks},
        ),
    )
    lines = {f"chunk {c}": [(float(n), seconds(c, n, "default")) for n in (0, *DECODES)] for c in chunks}
    panel = ReportChart(title="Batch time, default mode", x="decodes of 1K tokens", y="seconds", lines=lines)
    scenario = f"Llama-3 8B, 8 H100 (TP8), chunk over {PAST:,} tokens beside decodes of {CONTEXT:,}"
    return lone_report(scenario, map(of_small, MODES), rows, panel)


def against_vllm(options: RunOptions) -> ExperimentReport:
    """Reproduce Mnemosyne Fig. 13: the overhead of vLLM that the paper's ratios imply."""
    contexts, decode_gain, prefill_gain = (128_000, 256_000, 512_000, PROMPT), 3.8, 6.0
    # "a small chunk"; the figure does not say how small
    chunk = 32

    def tbt_s(context: int, mode: Mode) -> float:
        return of_small(mode).tbt_s(context)

    def by_decode_s(context: int, mode: Mode) -> float:
        return (decode_gain - 1) * tbt_s(context, mode)

    def by_prefill_s(context: int, mode: Mode) -> float:
        return (prefill_gain - 1) * static_prefill(of_small(mode), context, chunk).ttft_s / (context / chunk)

    def gains(mode: Mode) -> dict[str, float]:
        # the overhead that 3.8 implies at the longest context, at all of them
        overhead_s = by_decode_s(contexts[-1], mode)
        return {f"{context // 1000}K": 1 + overhead_s / tbt_s(context, mode) for context in contexts}

    implied = ", ".join(f"{by_decode_s(c, 'default') * 1e3:.1f} ms at {c // 1000}K" for c in contexts)
    rows = (
        judge(
            "Overhead of vLLM an iteration: implied by the prefill's ~6× over that by the decode's 3.8×, 1M tokens",
            "one cause for both: CPU overheads (§5)",
            band(0.5, 2.0),
            lambda mode: by_prefill_s(contexts[-1], mode) / by_decode_s(contexts[-1], mode),
            f"By the decode's 3.8×: {implied}.",
        ),
        judge(
            "TBT of vLLM over tensor parallelism alone by context, were its overhead the same at each",
            None,
            descending("falls"),
            gains,
            "The paper's overhead grows with the context (page tables), which keeps the ratio.",
        ),
    )
    lines = {f"{mode} mode": [(float(c), tbt_s(c, mode)) for c in contexts] for mode in MODES}
    panel = ReportChart(title="Decode, tensor parallelism alone", x="tokens", y="TBT, s", lines=lines, log_x=True)
    scenario = f"Llama-3 8B, 8 H100s (TP8), contexts of 128K to 1M, prefill in chunks of {chunk}"
    return lone_report(scenario, map(of_small, MODES), rows, panel)
