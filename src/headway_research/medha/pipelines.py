"""Stream pipelines to 128 H100s (TP8 inside a node, a stage a node), by the arithmetic of lone prefills and decodes.

Scaling: Medha Figs. 17 and 18, Mnemosyne Figs. 1, 15 and 16. Prompts of 1M to 10M tokens in chunks of 4096. A layout
that memory does not allow is a row without a time (the papers' red crosses). The papers' plots are not tables: claims
are those of captions and text.

Against context parallelism: Medha Fig. 5b and Mnemosyne Fig. 14, 1M tokens, Llama-3 8B. Context parallelism is no
system here: striped attention in a ring of all GPUs, as ring attention without tensor parallelism has it. Every GPU
computes its share of the rows and 1/p of causal attention, balanced, at the rate of our largest chunk less what
attention loses in a ring (`perf.latency.groups`, measured on eight A100 and extrapolated to 128 here); a layer's ring
has p steps, each the longer of computing a block and of passing on a KV block; nothing overlaps across layers. It
cannot be preempted.

Utilisation: Medha Figs. 15 and 16 (Mnemosyne Figs. 20 and 21). Which FLOPs of attention the papers' MFU counts is not
said: causal, or whole (4·n²·d·h_q, Mnemosyne Eq. 1, as their 2.4 and 2.8 ExaFLOP for 1M tokens of 70B are). Each row
shows both, with the kernel that the papers had (`arithmetic`): between them lies the range.
"""

from __future__ import annotations

from functools import partial

from headway.perf.latency.base import MAX_CHUNK
from headway.perf.latency.groups import ring_share
from headway.policy.iteration.config import SchedulerConfig
from headway.sim.build import InfeasibleError, plan_memory
from headway.sim.report.page import ReportChart
from headway_research.base import MODES, ClaimRow, ExperimentReport, Mode, RunOptions
from headway_research.medha.arithmetic import PAPER_KERNEL, lone_report, machine, prefill_flops, static_prefill
from headway_research.medha.kvp import served_tbt_s
from headway_research.verdicts import at_least, at_most, band, descending, judge, only, order, share_of_peak

NODES = (1, 2, 4, 8, 16)
CONTEXTS = (1_000_000, 2_000_000, 4_000_000, 10_000_000)
CHUNK = 4096
SMALL, LARGE = NAMES = ("llama-3-8b", "llama-3-70b")
UTILISATION = 0.9
PROMPT = 1_000_000
"""Tokens of the comparison with context parallelism."""
CIRCULAR = (
    "Circular: FLOPs over our own extrapolated times (histories end at 12,416 tokens), so no evidence for these times."
)


def _millions(context: int) -> str:
    return f"{context // 1_000_000}M"


# -- scaling -----------------------------------------------------------------------------------------------------------


def fits(name: str, stages: int, context: int) -> bool:
    """Return whether weights, activations and this context's KV fit TP8 × stages."""
    m = machine(name, stages, "default")
    config = SchedulerConfig(chunking=f"static:{CHUNK}", stages=stages, max_num_seqs=8)
    # Feasibility does not depend on the mode, which changes latencies only.
    try:
        plan_memory(m.device, m.shape, m.layout, config, (context, context), UTILISATION)
    except InfeasibleError:
        return False
    return True


def ttft_s(name: str, stages: int, context: int, mode: Mode) -> float | None:
    """Return the TTFT in seconds; None where the model or its KV does not fit."""
    return static_prefill(machine(name, stages, mode), context, CHUNK).ttft_s if fits(name, stages, context) else None


def efficiency(name: str, context: int, stages: int, mode: Mode) -> float | None:
    """Return the scaling efficiency: speed-up over the fewest stages that fit, divided by the ratio of stages."""
    # One stage often does not fit: the base is the smallest pipeline that does.
    base = next((n for n in NODES if fits(name, n, context)), None)
    whole = ttft_s(name, stages, context, mode)
    if base is None or whole is None:
        return None
    return (ttft_s(name, base, context, mode) or 0.0) * base / (whole * stages)


def decode_growth(name: str, stages: int, mode: Mode) -> float:
    """Return the relative increase of TBT over 2M tokens from one stage (whether or not it fits) to `stages`."""
    many, one = (machine(name, n, mode).tbt_s(2_000_000) for n in (stages, 1))
    return many / one - 1.0


def within_30s() -> ClaimRow:
    """Return the row of 2M tokens on 128 H100s."""
    find = partial(ttft_s, SMALL, 16, 2_000_000)
    return judge("8B, 2M tokens on 128 H100s: TTFT, seconds", "<= 30", at_most(30.0), find)


def _scaling_report(*rows: ClaimRow) -> ExperimentReport:
    panels = (
        ReportChart(
            title=f"{name}, paper mode",
            x="nodes of 8 H100s",
            y="TTFT, s",
            log_x=True,
            log_y=True,
            lines={
                _millions(context): [
                    (float(n), found) for n in NODES if (found := ttft_s(name, n, context, "paper")) is not None
                ]
                for context in CONTEXTS
            },
        )
        for name in NAMES
    )
    machines = [machine(name, n, mode) for name in NAMES for n in (1, 16) for mode in MODES]
    scenario = f"1 to 16 nodes of 8 H100s (TP8, a stage a node), chunks of {CHUNK}, {UTILISATION:.0%} of memory"
    return lone_report(scenario, machines, rows, *panels)


def prefill(options: RunOptions) -> ExperimentReport:
    """Reproduce Medha Fig. 17 and Mnemosyne Fig. 15."""

    def worst(name: str, mode: Mode) -> float:
        found = [efficiency(name, context, 16, mode) for context in CONTEXTS]
        return min(value for value in found if value is not None)

    def crosses(mode: Mode) -> dict[str, int]:
        return {f"{name} {_millions(c)}": sum(not fits(name, n, c) for n in NODES) for name in NAMES for c in CONTEXTS}

    return _scaling_report(
        *(
            judge(
                f"{name}: scaling efficiency at 128 H100s, the worst of 1M to 10M",
                "80%+",
                at_least(0.8),
                partial(worst, name),
            )
            for name in NAMES
        ),
        judge(
            "70B: scaling efficiency at 8 stages, 2M tokens",
            "85%",
            at_least(0.85),
            partial(efficiency, LARGE, 2_000_000, 8),
        ),
        judge(
            "Layouts of 1, 2, 4, 8, 16 nodes that memory does not allow, by model and context",
            "red crosses at long contexts on few nodes (positions only drawn)",
            order(
                "more crosses for 70B at 10M than at 1M, and 10M fits on 16 nodes",
                lambda found: (
                    found[f"{LARGE} 10M"] > found[f"{LARGE} 1M"] and all(value < len(NODES) for value in found.values())
                ),
            ),
            crosses,
        ),
        within_30s(),
    )


def decode(options: RunOptions) -> ExperimentReport:
    """Reproduce Medha Fig. 18 and Mnemosyne Fig. 16."""
    note = (
        "By the fit every stage costs the host 0.3 ms and every hop between nodes its latency; the LM head is counted "
        "in each stage."
    )
    return _scaling_report(
        *(
            judge(
                f"{name}: TBT at 2M tokens grows by so much with 8 stages",
                "+16%" if name == SMALL else "only marginally",
                band(0.0, 0.25),
                partial(decode_growth, name, 8),
                note,
            )
            for name in NAMES
        ),
        judge(
            "8B: TBT at 2M tokens grows by so much with 16 stages",
            "only marginally",
            band(0.0, 0.4),
            partial(decode_growth, SMALL, 16),
        ),
    )


def overview(options: RunOptions) -> ExperimentReport:
    """Reproduce Mnemosyne Fig. 1: up to 10M tokens on 128 H100s."""
    return _scaling_report(
        judge(
            "8B on 128 H100s: TTFT by context, seconds (16 stages)",
            "up to 10M tokens",
            order("every context fits", lambda found: all(value is not None for value in found.values())),
            lambda mode: {_millions(c): ttft_s(SMALL, 16, c, mode) for c in CONTEXTS},
        ),
        judge(
            "8B on 128 H100s: TBT by context (4 stages, 4 KV groups), the longest, seconds",
            "low, interactive (30 ms)",
            at_most(0.030),
            lambda mode: max(served_tbt_s(SMALL, 4, c, 4, mode) for c in CONTEXTS),
        ),
    )


# -- against context parallelism ---------------------------------------------------------------------------------------


def spp_s(nodes: int, mode: Mode) -> float:
    """Return the TTFT in seconds of the stream pipeline."""
    return static_prefill(machine(SMALL, nodes, mode), PROMPT, CHUNK).ttft_s


def striped_s(nodes: int, mode: Mode, members_per_node: int = 8) -> float:
    """Return the TTFT in seconds of striped attention, with arithmetic as in the module's docstring.

    members_per_node: 8 for a ring of all GPUs, 1 for a ring of nodes with tensor parallelism inside."""
    m = machine(SMALL, 1, mode)
    mine, ring = PROMPT // nodes, nodes * members_per_node
    rows = m.latency.rows_s(MAX_CHUNK) * mine / MAX_CHUNK
    # attention of the whole prompt in the largest chunks: a triangle of own parts and histories
    chunks = PROMPT / MAX_CHUNK
    own, over = m.latency.attention_s(0, MAX_CHUNK), m.latency.attention_s(PROMPT // 2, MAX_CHUNK)
    whole = (chunks * own + chunks * (over - own) * (PROMPT - MAX_CHUNK) / PROMPT) / ring_share(ring)
    layers = m.shape.layers
    # Keys and values that a GPU passes on: all heads of its own tokens, or one rank's heads of its node's tokens.
    block_bytes = 2 * mine * m.part.kv_heads * m.part.head_dim * m.shape.dtype_bytes
    pass_s = m.layout.across_link(m.device).transfer_s(block_bytes) if nodes > 1 else 0.0
    # One ring step of one layer: a GPU's share of attention over one block of the ring.
    step_s = whole / nodes / layers / ring
    return rows + layers * ring * max(step_s, pass_s)


def granularity_s(mode: Mode) -> float:
    """Return the longest iteration of a stage of 16."""
    return static_prefill(machine(SMALL, 16, mode), PROMPT, CHUNK).worst_s


def _against_report(of_medha: bool) -> ExperimentReport:
    rows = [
        judge(
            "1M tokens on 128 H100s: context parallelism over SPP",
            "1.64×",
            band(1.4, 1.9),
            lambda mode: striped_s(16, mode) / spp_s(16, mode),
            "A ring of 128 GPUs loses 6.1% of attention a doubling. With tensor parallelism in the node, a ring of 16: "
            f"{striped_s(16, 'default', 1) / spp_s(16, 'default'):.2f}. Transfers hide behind attention.",
        ),
        judge(
            "SPP scales: TTFT by nodes, seconds",
            "nearly linear",
            descending("falls"),
            lambda mode: {str(n): spp_s(n, mode) for n in NODES},
        ),
    ]
    if not of_medha:
        rows += [
            judge("1M tokens on 128 H100s with SPP, seconds", "< 15", at_most(15.0), partial(spp_s, 16)),
            judge(
                "Preemption granularity of SPP: the longest iteration of a stage, 16 stages, seconds",
                "0.062",
                band(0.03, 0.1),
                only("paper", granularity_s("paper")),
                f"Chunks of 4096, as in the paper's comparison. {PAPER_KERNEL}; with FlashAttention-3 "
                f"{granularity_s('default'):.3f} s.",
            ),
            judge(
                "Striped attention blocks for its whole prefill, one node, seconds",
                "up to 120",
                band(60.0, 180.0),
                only("paper", striped_s(1, "paper")),
                f"{PAPER_KERNEL}; with FlashAttention-3 {striped_s(1, 'default'):.0f} s.",
                approximate=True,
            ),
            judge(
                "Wait behind a prefill of 1M tokens on 128 H100s: striped attention over SPP's longest iteration",
                "orders of magnitude",
                at_least(100.0),
                lambda mode: striped_s(16, mode) / granularity_s(mode),
                approximate=True,
            ),
        ]
    ours, striped = spp_s(16, "paper"), striped_s(16, "paper")
    panel = ReportChart(
        title=f"SPP reads 1M tokens in {ours:.1f} s, context parallelism in {striped:.1f} s",
        x="nodes of 8 H100s",
        unit="seconds",
        log_x=True,
        log_y=True,
        lines={
            "SPP": [(float(n), spp_s(n, "paper")) for n in NODES],
            "context parallelism (arithmetic)": [(float(n), striped_s(n, "paper")) for n in NODES],
        },
    )
    scenario = "Llama-3 8B, 1 to 16 nodes of 8 H100s, 1M tokens, SPP chunks of 4096; the CP side is arithmetic"
    return lone_report(scenario, [machine(SMALL, n, "paper") for n in (1, 16)], rows, panel)


def against_medha(options: RunOptions) -> ExperimentReport:
    """Reproduce Medha Fig. 5b."""
    return _against_report(of_medha=True)


def against_mnemosyne(options: RunOptions) -> ExperimentReport:
    """Reproduce Mnemosyne Fig. 14: latency, and the waiting time of other requests."""
    return _against_report(of_medha=False)


# -- utilisation -------------------------------------------------------------------------------------------------------


def mfu(name: str, stages: int, context: int, count: str, mode: Mode = "paper") -> float:
    """Return the model FLOPs of a prefill over peak. count: causal, or whole. mode: of the times."""
    m = machine(name, stages, mode)
    # whole attention is twice the causal count
    flops = prefill_flops(m.shape, context) + (m.shape.attention_flops(context, 0) if count == "whole" else 0.0)
    return flops / (static_prefill(m, context, CHUNK).ttft_s * m.device.flops * m.layout.accelerators)


def mbu(name: str, context: int, groups: int, mode: Mode) -> float:
    """Return the bytes of weights (once a group) and KV that a decode reads in one TBT, over peak; one stage."""
    m = machine(name, 1, mode)
    # every KV group has its own copy of the weights
    read = groups * m.shape.parameters * m.shape.dtype_bytes + context * m.shape.kv_bytes_per_token
    return read / (m.tbt_s(context, groups=groups) * m.device.bandwidth * m.layout.accelerators * groups)


def _utilisation_report(rows: list[ClaimRow], panel: ReportChart) -> ExperimentReport:
    scenario = f"H100, TP8, 1 to 16 stages; lone prefill in chunks of {CHUNK}, lone decode"
    return lone_report(scenario, [machine(LARGE, n, "default") for n in (1, 4, 16)], rows, panel)


def mfu_figure(options: RunOptions) -> ExperimentReport:
    """Reproduce Medha Fig. 15."""

    def spanned(found: dict[str, float]) -> bool:
        return found["causal"] <= 0.5 and 0.6 <= found["whole"] <= 1.0

    rows = [
        judge(
            f"{LARGE}, {_millions(c)} tokens on {8 * n} H100s: MFU, attention counted causal and whole",
            "50-60% (which count is not said)",
            order("50 to 60% lie between the two counts, both possible", spanned),
            only("paper", {count: mfu(LARGE, n, c, count) for count in ("causal", "whole")}),
            f"{PAPER_KERNEL}. With FlashAttention-3 {mfu(LARGE, n, c, 'causal', 'default'):.2f} causal, and "
            f"{mfu(LARGE, n, c, 'whole', 'default'):.2f} whole, which is impossible. {CIRCULAR}",
            approximate=True,
        )
        for n, c in ((4, 1_000_000), (4, 2_000_000), (16, 1_000_000), (16, 4_000_000))
    ]
    rows.append(
        judge(
            f"{LARGE}, 128 H100s: MFU counted whole, the worst of 1M to 4M tokens",
            "> 50%",
            share_of_peak(0.5),
            only("paper", min(mfu(LARGE, 16, c, "whole") for c in CONTEXTS[:3])),
            CIRCULAR,
            approximate=True,
        )
    )
    lines = {
        f"{name}, {_millions(c)}": [(float(8 * n), mfu(name, n, c, "causal")) for n in (1, 4, 16)]
        for name in NAMES
        for c in CONTEXTS[:2]
    }
    panel = ReportChart(title="MFU of a prefill, causal count", x="H100s", y="MFU", lines=lines, log_x=True)
    return _utilisation_report(rows, panel)


def mbu_figure(options: RunOptions) -> ExperimentReport:
    """Reproduce Medha Fig. 16."""
    groups = (1, 2, 4)
    lines = {f"{name}, 10M": [(float(8 * k), mbu(name, 10_000_000, k, "default")) for k in groups] for name in NAMES}
    rows = [
        judge(
            "MBU of a decode, the best of 1, 2, 4 KV groups and 1M to 10M tokens (8B, TP8)",
            "up to 92%",
            share_of_peak(0.85, 0.97),
            lambda mode: max(mbu(SMALL, c, k, mode) for c in (1_000_000, 10_000_000) for k in groups),
            "In the public profile large reads of KV reach 0.93 of the data sheet's bandwidth.",
        ),
        judge(
            "Utilisation falls as KV groups grow (8B, 1M tokens): MBU at 1 over MBU at 4",
            "falls",
            at_least(1.0),
            lambda mode: mbu(SMALL, 1_000_000, 1, mode) / mbu(SMALL, 1_000_000, 4, mode),
        ),
    ]
    return _utilisation_report(rows, ReportChart(title="MBU of a decode", x="H100s", y="MBU", lines=lines))
