"""Medha Fig. 5b and Mnemosyne Fig. 14: stream pipeline against context parallelism, 1M tokens, Llama-3 8B, 1-16 nodes.

SPP: TP8 in a node, a stage a node, chunks of 4096 (as §6.2 of Mnemosyne). Context parallelism is arithmetic, not a
system: striped attention in a ring of all GPUs, as ring attention without tensor parallelism has it. Every GPU computes
its share of the rows and 1/p of causal attention, balanced, at the rate of our largest chunk less what attention loses
in a ring (`perf.latency.groups`, measured on eight A100 and extrapolated to 128 here); a layer's ring has p steps, each
the longer of computing a block and of passing on a KV block; nothing overlaps across layers. It cannot be preempted.

In paper mode attention runs at FlashAttention-2's rate on both sides, the kernels of the papers' date (`arithmetic`).
"""

from __future__ import annotations

from headway.perf.latency.base import MAX_CHUNK
from headway.perf.latency.groups import ring_share
from headway.sim.report.page import ReportChart
from headway_research.base import ClaimRow, ExperimentReport, Mode, RunOptions
from headway_research.medha.arithmetic import PAPER_KERNEL, latency_source, machine, static_prefill
from headway_research.verdicts import at_least, at_most, band, both, descending, judge, only

PROMPT = 1_000_000
CHUNK = 4096
NODES = (1, 2, 4, 8, 16)


def spp_s(nodes: int, mode: Mode) -> float:
    """Return the TTFT in seconds of the stream pipeline."""
    return static_prefill(machine("h100", "llama-3-8b", 8, nodes, mode), PROMPT, CHUNK).ttft_s


def striped_s(nodes: int, mode: Mode, members_per_node: int = 8) -> float:
    """Return the TTFT in seconds of striped attention, with arithmetic as in the module's docstring.

    members_per_node: 8 for a ring of all GPUs, 1 for a ring of nodes with tensor parallelism inside."""
    m = machine("h100", "llama-3-8b", 8, 1, mode)
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


def _rows(full: bool) -> list[ClaimRow]:
    def ratio(mode: Mode) -> float:
        return striped_s(NODES[-1], mode) / spp_s(NODES[-1], mode)

    rows = [
        judge(
            "1M tokens on 128 H100s: context parallelism over SPP",
            "1.64×",
            band(1.4, 1.9),
            both(ratio),
            "A ring of 128 GPUs loses 6.1% of attention a doubling. With tensor parallelism in the node, a ring of 16: "
            f"{striped_s(NODES[-1], 'default', 1) / spp_s(NODES[-1], 'default'):.2f}. Transfers hide "
            "behind attention.",
        ),
        judge(
            "SPP scales: TTFT by nodes, seconds",
            "nearly linear",
            descending("falls"),
            both(lambda mode: {str(n): spp_s(n, mode) for n in NODES}),
        ),
    ]
    if full:
        rows.append(
            judge("1M tokens on 128 H100s with SPP, seconds", "< 15", at_most(15.0), both(lambda m: spp_s(16, m)))
        )
    return rows


def _report(rows: list[ClaimRow]) -> ExperimentReport:
    panel = ReportChart(
        title="Prefill of 1M tokens, paper mode",
        x="nodes of 8 H100s",
        y="TTFT, s",
        log_x=True,
        log_y=True,
        lines={
            "SPP": [(float(n), spp_s(n, "paper")) for n in NODES],
            "context parallelism (arithmetic)": [(float(n), striped_s(n, "paper")) for n in NODES],
        },
    )
    machines = [machine("h100", "llama-3-8b", 8, n, "paper") for n in (1, 16)]
    scenario = "Llama-3 8B, 1 to 16 nodes of 8 H100s, 1M tokens, SPP chunks of 4096; the CP side is arithmetic"
    return ExperimentReport(source=latency_source(*machines, scenario=scenario), rows=tuple(rows), panels=(panel,))


def medha(options: RunOptions) -> ExperimentReport:
    """Reproduce Medha Fig. 5b."""
    return _report(_rows(False))


def mnemosyne(options: RunOptions) -> ExperimentReport:
    """Reproduce Mnemosyne Fig. 14: latency, and the waiting time of other requests."""
    rows = _rows(True)

    def granularity(nodes: int, mode: Mode) -> float:
        return static_prefill(machine("h100", "llama-3-8b", 8, nodes, mode), PROMPT, CHUNK).worst_s

    rows.append(
        judge(
            "Preemption granularity of SPP: the longest iteration of a stage, 16 stages, seconds",
            "0.062",
            band(0.03, 0.1),
            only("paper", granularity(16, "paper")),
            f"Chunks of 4096, as in the paper's comparison. {PAPER_KERNEL}; with FlashAttention-3 "
            f"{granularity(16, 'default'):.3f} s.",
        )
    )
    rows.append(
        judge(
            "Striped attention blocks for its whole prefill, one node, seconds",
            "up to 120",
            band(60.0, 180.0),
            only("paper", striped_s(1, "paper")),
            f"{PAPER_KERNEL}; with FlashAttention-3 {striped_s(1, 'default'):.0f} s.",
            approximate=True,
        )
    )
    rows.append(
        judge(
            "Wait behind a prefill of 1M tokens on 128 H100s: striped attention over SPP's longest iteration",
            "orders of magnitude",
            at_least(100.0),
            both(lambda mode: striped_s(16, mode) / granularity(16, mode)),
            approximate=True,
        )
    )
    return _report(rows)
