"""The TTFT-TBT trade-off of 3D parallelism, and how groups join: Medha Figs. 6 and 20, Mnemosyne Figs. 18 and 19.

Rows are served (`kvp_served`): one prefill, groups joining as their shards fill. Fig. 20's curves, three dozen prefills
of up to 125,000 chunks, are drawn by arithmetic over the same fitted latencies (Mnemosyne's Eq. 10 with shards that
fill one after another), and a row says how far that is from what is served. The caption says p_tp = 4 and p_spp = 4
with 8 KV heads.
"""

from __future__ import annotations

from functools import partial

from headway.sim.report.page import ReportChart
from headway_research.base import MODES, ClaimRow, ExperimentReport, Mode, RunOptions
from headway_research.medha.arithmetic import lone_report, machine, static_prefill
from headway_research.medha.kvp_served import KvpServedResult, scenario, served
from headway_research.verdicts import ascending, at_most, band, descending, judge, order

CHUNKS = (32, 64, 128, 256)
GROUPS = (1, 2, 4)
CONTEXTS = (1_000_000, 2_000_000, 4_000_000)
GPUS = 32
"""GPUs of one KV group: TP8 × 4 stages."""


EQUATION = (
    "Headway's own check; how groups exchange rows is what differs. Eq. 10 itself, with a history cut evenly over the "
    "groups that are there, gives up to 15% less: a shard is full before the next one begins."
)
Point = tuple[float, float]
"""(TTFT, P95 of the time that a decode batched with the prefill waits for its token), seconds."""


def by_equation(context: int, chunk: int, groups: int, mode: Mode) -> Point:
    """Return the point of one chunk size and number of KV groups by Mnemosyne's Eqs. 9 and 10."""
    m = machine("llama-3-8b", 4, mode, tp=4)
    found = static_prefill(m, context, chunk, groups)
    return found.ttft_s, m.through_s(found.percentile_s(95), chunk)


def point(context: int, chunk: int, groups: int, mode: Mode) -> Point:
    """Return the point of one chunk size and number of KV groups by simulation."""
    found = served("llama-3-8b", 4, 4, groups, context, chunk, mode)
    return found.ttft_s, found.through_percentile_s(95)


def _trade_rows(million: int) -> list[ClaimRow]:
    """Judge the claims on the trade-off. million: tokens that stand for 1M (fewer in a smoke test)."""

    def by_chunk(which: int, mode: Mode) -> dict[str, float]:
        return {str(c): point(million, c, 1, mode)[which] for c in CHUNKS}

    def by_groups(which: int, mode: Mode) -> dict[str, float]:
        return {str(k): point(4 * million, 256, k, mode)[which] for k in GROUPS}

    def small(mode: Mode) -> float:
        return point(million, 32, 4, mode)[0] / point(million, 32, 1, mode)[0]

    def large(mode: Mode) -> float:
        found = by_groups(0, mode)
        return found["4"] / found["1"]

    def off(mode: Mode) -> float:
        looked = [(million, 32, 1), (million, 256, 1), (million, 32, 4), *((4 * million, 256, k) for k in GROUPS)]
        ratios = [
            ours / theirs
            for at in looked
            for ours, theirs in zip(point(*at, mode), by_equation(*at, mode), strict=True)
        ]
        return max(ratios, key=lambda ratio: abs(ratio - 1.0))

    falls, rises = descending("falls"), ascending("rises")
    return [
        judge("1M, one KV group: TTFT by chunk, seconds", "falls", falls, partial(by_chunk, 0)),
        judge("1M, one KV group: P95 TBT by chunk, seconds", "rises", rises, partial(by_chunk, 1)),
        judge("4M, chunk 256: P95 TBT by KV groups, seconds", "falls", falls, partial(by_groups, 1)),
        judge("1M, chunk 32: TTFT with 4 KV groups over 1", ">= 1: lower degrees are better here",
              order("at least 1", lambda value: value >= 1.0), small),
        judge("4M, chunk 256: TTFT with 4 KV groups over 1", "< 1", at_most(1.0), large),
        judge("As served over the arithmetic of the curves, TTFT and P95 TBT of the points above, the furthest", None,
              band(0.9, 1.1), off, EQUATION),
    ]  # fmt: skip


def trade(options: RunOptions) -> ExperimentReport:
    """Reproduce Medha Fig. 20 and Mnemosyne Fig. 18."""
    panels = tuple(
        ReportChart(
            title=f"{context // 1_000_000}M tokens, default mode, arithmetic",
            x="TTFT, s",
            y="P95 TBT, s",
            lines={f"KVP {k}": [by_equation(context, c, k, "default") for c in CHUNKS] for k in GROUPS},
        )
        for context in CONTEXTS
    )
    machines = [machine("llama-3-8b", 4, mode, tp=4) for mode in MODES]
    setting = "one prefill of Llama-3 8B, simulated; H100, TP4 × 4 stages × 1, 2, 4 KV groups, chunks 32 to 256"
    rows = _trade_rows(50_000 if options.quick else 1_000_000)
    shown = scenario("llama-3-8b", 4, 4, 4, 4_000_000, 256)
    return lone_report(setting, machines, rows, *panels, as_scenario_file=shown)


class JoinTimeline:
    """Simulated prefills of one prompt length, by model, mode and number of KV groups."""

    chunk = 256
    names = ("llama-3-8b", "llama-3-70b")

    def __init__(self, prompt: int) -> None:
        self.prompt = prompt

    def served(self, name: str, mode: Mode, groups: int = 4) -> KvpServedResult:
        return served(name, 8, 4, groups, self.prompt, self.chunk, mode)

    def join_shares(self, name: str, mode: Mode) -> dict[str, float]:
        """Return the times at which the second, third and fourth group join, as shares of the TTFT."""
        found = self.served(name, mode)
        return {f"{GPUS * join.groups} GPUs": join.at_s / found.ttft_s for join in found.joins}

    def join_tokens(self, mode: Mode) -> dict[str, list[int]]:
        """Return the tokens that are cached when groups join, by model."""
        return {name: [join.start for join in self.served(name, mode).joins] for name in self.names}

    def growth(self, name: str, groups: int, mode: Mode) -> float:
        """Return the ratio of the last quarter's slowest batch to the first quarter's."""
        seconds = self.served(name, mode, groups).through_s
        quarter = len(seconds) // 4
        return max(seconds[-quarter:]) / max(seconds[:quarter])

    def equal_shards(self, found: dict[str, list[int]]) -> bool:
        """Return whether groups join at quarters of the prompt, within a block of 64 tokens a shard."""
        return all(
            abs(at - quarter * self.prompt // 4) <= 64 * quarter
            for starts in found.values()
            for quarter, at in enumerate(starts, 1)
        )


def timeline(options: RunOptions) -> ExperimentReport:
    """Mnemosyne Fig. 19, Medha Fig. 6: KV groups join while 2M tokens are prefilled (Mnemosyne's caption says 8B, its
    text 70B; both here).

    TP8 × 4 stages, chunks of 256; a group of 32 GPUs joins whenever a quarter of the prompt has filled a shard."""
    runs = JoinTimeline(200_000 if options.quick else 2_000_000)
    names, prompt = runs.names, runs.prompt
    panels = [_gpus_panel(name, runs.served(name, "default")) for name in names]
    panels += [_batches_panel(name, runs.served(name, "default"), runs.served(name, "default", 1)) for name in names]
    machines = [machine(name, 4, mode) for name in names for mode in MODES]
    setting = f"a prefill of {prompt:,} tokens alone, simulated; TP8 × 4 stages, 1 to 4 KV groups (32 to 128 H100s), "
    shown = scenario("llama-3-8b", 8, 4, 4, prompt, runs.chunk)
    setting += f"chunks of {runs.chunk}, equal shards"
    return lone_report(setting, machines, _timeline_rows(runs), *panels, as_scenario_file=shown)


def _timeline_rows(runs: JoinTimeline) -> list[ClaimRow]:
    in_order = [f"{GPUS * k} GPUs" for k in (2, 3, 4)]
    growth = [
        judge(
            f"{name}: batches stay as long as groups join: worst of the last quarter over that of the first",
            "near consistent",
            band(0.75, 1.33),
            partial(runs.growth, name, 4),
            f"Without KV groups: {runs.growth(name, 1, 'default'):.1f}× in default mode.",
        )
        for name in runs.names
    ]
    shares = [
        judge(
            f"{name}: from 32 GPUs on, 32 more join one at a time; when, as a share of the TTFT",
            "64, 96, 128 GPUs, by the tokens processed so far",
            order(
                "64, 96, 128 GPUs in this order",
                lambda found: list(found) == in_order and ascending("")(found),
            ),
            partial(runs.join_shares, name),
            "Iterations are near consistent, so that groups join near evenly.",
        )
        for name in runs.names
    ]
    tokens = judge(
        "Tokens that are cached when groups join",
        "a quarter, half and three quarters of the prompt (the limit of a group is not said)",
        order("equal shards, within a block of 64 tokens", runs.equal_shards),
        runs.join_tokens,
    )
    return [*growth, *shares, tokens]


def _gpus_panel(name: str, found: KvpServedResult) -> ReportChart:
    """Plot the accelerators in use over time: a step at every join."""
    points = [(0.0, float(GPUS))]
    for join in found.joins:
        points += [(join.at_s, points[-1][1]), (join.at_s, float(GPUS * join.groups))]
    return ReportChart(
        title=name, x="seconds", y="H100s", lines={"participating": [*points, (found.ttft_s, points[-1][1])]}
    )


def _batches_panel(name: str, grown: KvpServedResult, alone: KvpServedResult) -> ReportChart:
    """Plot batch times over the prompt, with groups that join and without."""
    lines = {}
    for label, one in (("4 KV groups", grown), ("1", alone)):
        step = max(1, len(one.through_s) // 100)
        total = len(one.through_s)
        lines[label] = [(i / total, one.through_s[i]) for i in range(0, total, step)]
    return ReportChart(title=f"{name}: batches", x="share of the prompt", y="seconds through the stages", lines=lines)
