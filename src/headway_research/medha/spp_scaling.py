"""Stream pipelines up to 128 H100s: Medha Figs. 17 and 18, Mnemosyne Figs. 1, 15 and 16.

TP8 inside a node, a stage a node, 1 to 16 nodes, prompts of 1M to 10M tokens in chunks of 4096. A layout that memory
does not allow is a row without a time (the papers' red crosses). The papers' plots are not tables: claims are those of
captions and text.
"""

from __future__ import annotations

from functools import partial

from headway.policy.iteration.config import SchedulerConfig
from headway.sim.build import InfeasibleError, plan_memory
from headway.sim.report.page import ReportChart
from headway_research.base import MODES, ClaimRow, ExperimentReport, Mode, RunOptions
from headway_research.medha.arithmetic import latency_source, machine, static_prefill
from headway_research.medha.kvp_served import served_tbt_s
from headway_research.verdicts import at_least, at_most, band, both, judge, order

NODES = (1, 2, 4, 8, 16)
CONTEXTS = (1_000_000, 2_000_000, 4_000_000, 10_000_000)
CHUNK = 4096
NAMES = ("llama-3-8b", "llama-3-70b")
UTILISATION = 0.9


def fits(name: str, stages: int, context: int) -> bool:
    """Return whether weights, activations and this context's KV fit TP8 × stages."""
    m = machine("h100", name, 8, stages, "default")
    config = SchedulerConfig(chunking=f"static:{CHUNK}", stages=stages, max_num_seqs=8)
    # Feasibility does not depend on the mode, which changes latencies only.
    try:
        plan_memory(m.device, m.shape, m.layout, config, (context, context), UTILISATION)
    except InfeasibleError:
        return False
    return True


def ttft_s(name: str, stages: int, context: int, mode: Mode) -> float | None:
    """Return the TTFT in seconds; None where the model or its KV does not fit."""
    if not fits(name, stages, context):
        return None
    return static_prefill(machine("h100", name, 8, stages, mode), context, CHUNK).ttft_s


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

    def tbt(n: int) -> float:
        return machine("h100", name, 8, n, mode).tbt_s(2_000_000)

    return tbt(stages) / tbt(1) - 1.0


def _scaling_rows() -> list[ClaimRow]:
    def worst(name: str, mode: Mode) -> float:
        found = [efficiency(name, context, 16, mode) for context in CONTEXTS]
        return min(value for value in found if value is not None)

    def crosses(mode: Mode) -> dict[str, int]:
        return {
            f"{name} {c // 1_000_000}M": sum(not fits(name, n, c) for n in NODES) for name in NAMES for c in CONTEXTS
        }

    return [
        judge(f"{name}: scaling efficiency at 128 H100s, the worst of 1M to 10M", "80%+", at_least(0.8),
              both(partial(worst, name)))
        for name in NAMES
    ] + [
        judge(
            "70B: scaling efficiency at 8 stages, 2M tokens",
            "85%",
            at_least(0.85),
            both(partial(efficiency, "llama-3-70b", 2_000_000, 8)),
        ),
        judge(
            "Layouts of 1, 2, 4, 8, 16 nodes that memory does not allow, by model and context",
            "red crosses at long contexts on few nodes (positions only drawn)",
            order(
                "more crosses for 70B at 10M than at 1M, and 10M fits on 16 nodes",
                lambda found: found["llama-3-70b 10M"] > found["llama-3-70b 1M"]
                and all(value < len(NODES) for value in found.values()),
            ),
            both(crosses),
        ),
    ]  # fmt: skip


def _decode_rows() -> list[ClaimRow]:
    return [
        judge(
            f"{name}: TBT at 2M tokens grows by so much with 8 stages",
            "+16%" if name == "llama-3-8b" else "only marginally",
            band(0.0, 0.25),
            both(partial(decode_growth, name, 8)),
            "By the fit every stage costs the host 0.3 ms and every hop between nodes its latency; the LM head is "
            "counted in each stage.",
        )
        for name in NAMES
    ] + [
        judge(
            "8B: TBT at 2M tokens grows by so much with 16 stages",
            "only marginally",
            band(0.0, 0.4),
            both(partial(decode_growth, "llama-3-8b", 16)),
        )
    ]


def _report(rows: list[ClaimRow]) -> ExperimentReport:
    panels = tuple(
        ReportChart(
            title=f"{name}, paper mode",
            x="nodes of 8 H100s",
            y="TTFT, s",
            log_x=True,
            log_y=True,
            lines={
                f"{context // 1_000_000}M": [
                    (float(n), found) for n in NODES if (found := ttft_s(name, n, context, "paper")) is not None
                ]
                for context in CONTEXTS
            },
        )
        for name in NAMES
    )
    machines = [machine("h100", name, 8, n, mode) for name in NAMES for n in (1, 16) for mode in MODES]
    scenario = f"1 to 16 nodes of 8 H100s (TP8, a stage a node), chunks of {CHUNK}, {UTILISATION:.0%} of memory"
    return ExperimentReport(source=latency_source(*machines, scenario=scenario), rows=tuple(rows), panels=panels)


def prefill(options: RunOptions) -> ExperimentReport:
    """Reproduce Medha Fig. 17 and Mnemosyne Fig. 15."""
    rows = _scaling_rows()
    rows.append(
        judge(
            "8B, 2M tokens on 128 H100s: TTFT, seconds",
            "<= 30",
            at_most(30.0),
            both(partial(ttft_s, "llama-3-8b", 16, 2_000_000)),
        )
    )
    return _report(rows)


def decode(options: RunOptions) -> ExperimentReport:
    """Reproduce Medha Fig. 18 and Mnemosyne Fig. 16."""
    return _report(_decode_rows())


def overview(options: RunOptions) -> ExperimentReport:
    """Reproduce Mnemosyne Fig. 1: up to 10M tokens on 128 H100s."""

    def times(mode: Mode) -> dict[str, float | None]:
        return {f"{c // 1_000_000}M": ttft_s("llama-3-8b", 16, c, mode) for c in CONTEXTS}

    def gaps(mode: Mode) -> dict[str, float]:
        return {f"{c // 1_000_000}M": served_tbt_s("llama-3-8b", 4, c, 4, mode) for c in CONTEXTS}

    rows = [
        judge(
            "8B on 128 H100s: TTFT by context, seconds (16 stages)",
            "up to 10M tokens",
            order("every context fits", lambda found: all(value is not None for value in found.values())),
            both(times),
        ),
        judge(
            "8B on 128 H100s: TBT by context (4 stages, 4 KV groups), the longest, seconds",
            "low, interactive (30 ms)",
            at_most(0.030),
            both(lambda mode: max(gaps(mode).values())),
        ),
    ]
    return _report(rows)
