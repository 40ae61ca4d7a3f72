"""KV parallelism: decode (Medha Figs. 7 and 19, Mnemosyne Fig. 17, and the Amdahl arithmetic behind them), the TTFT-TBT
trade-off of 3D parallelism, and how groups join (Medha Figs. 6 and 20, Mnemosyne Figs. 18 and 19).

Both are simulated (`served`): one request alone, with the live scheduler on the simulator's clock. It enters one group;
whenever its shard there is full another group joins (`policy.iteration.groups`). Shards are equal: the request's tokens
over the groups. Each point is a scenario file; the modes differ in latencies as in `arithmetic`, which computes the
same figures by Mnemosyne's Eqs. 9 and 10 for comparison.

Decode: the TBT of one request alone, and batches of a prefill that decodes may share. Medha's App. B.2 states 40% for
degree 4; its Figs. 7 and 19 show it for degree 2, which agrees with the papers' other numbers.

The engine. By the papers' own pair (two groups decode at about 30 tokens a second, "almost 40%" sooner than one) what
is not attention takes 11 ms a token; the fit has some 3 ms for four stages, so their engine spends about 8 ms more
(§5 of both papers is about it). In paper mode every decode takes `engine_s` more, which is fitted to that pair; the
other figures of Fig. 17 are then predictions. Default mode has the fit alone.

The trade-off: Fig. 20's curves, three dozen prefills of up to 125,000 chunks, are drawn by arithmetic over the same
fitted latencies (Mnemosyne's Eq. 10 with shards that fill one after another), and a row says how far that is from what
is served. The caption says p_tp = 4 and p_spp = 4 with 8 KV heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np

from headway.perf.hardware import accelerator, model
from headway.sim import metrics
from headway.sim.build import instance_of, requests_of, run_of
from headway.sim.loop import simulate
from headway.sim.report.page import ReportChart
from headway.sim.result import GroupJoin
from headway.sim.scenario import parse_scenario
from headway_research.base import MODES, ClaimRow, ExperimentReport, Mode, RunOptions
from headway_research.medha.arithmetic import lone_report, machine, static_prefill
from headway_research.verdicts import ascending, at_least, at_most, band, descending, exact, judge, judge_same, order

PREFILL_CHUNK = 4096
TOKENS = 17
"""Output tokens of a request whose TBT is measured: 16 gaps."""


@dataclass(frozen=True)
class KvpServedResult:
    """Times of one request served alone; tuples are by batch of its prefill, in order."""

    ttft_s: float
    tbt_s: float | None
    """Median gap between its tokens; None: one token only."""
    began_s: tuple[float, ...]
    """Start of each prefill batch."""
    through_s: tuple[float, ...]
    """Seconds of each prefill batch from entering the first stage to leaving the last."""
    groups: tuple[int, ...]
    """Number of groups that took part in each prefill batch."""
    joins: tuple[GroupJoin, ...]

    def through_percentile_s(self, percent: float) -> float:
        """Return the percentile over prefill batches of the time that a decode batched with one waits for its token."""
        return float(np.percentile(self.through_s, percent))


def scenario(name: str, tp: int, stages: int, groups: int, prompt: int, chunk: int, output: int = 1) -> dict[str, Any]:
    """Return the set-up as scenario data for `headway simulate` (default mode's latencies)."""
    layout: dict[str, Any] = {"tp": tp, "stages": stages, "kvp": groups}
    # Equal shards: the last group joins when the others are full.
    if groups > 1:
        layout["shard_tokens"] = -(-prompt // groups)
    return {
        "name": f"{name}, {prompt:,} tokens, TP{tp} × {stages} stages × {groups} KV groups, chunks of {chunk}",
        "about": "latencies fitted to public H100 operator profiles; contexts beyond 12K tokens extrapolated",
        "cluster": {"accelerator": "h100"},
        "model": name,
        "layout": layout,
        "latency": {"source": "fitted"},
        "policy": {
            "policy": "fcfs", "chunking": f"static:{chunk}", "max_num_batched_tokens": chunk, "max_num_seqs": 8,
        },
        "workload": {
            "mix": [{"class": "long", "prompt": f"fixed:{prompt}", "output": f"fixed:{output}"}],
            "requests": 1, "arrivals": "at-once",
        },
    }  # fmt: skip


@cache
def served(
    name: str, tp: int, stages: int, groups: int, prompt: int, chunk: int, mode: Mode, output: int = 1
) -> KvpServedResult:
    """Simulate the request. Raises InfeasibleError where its KV does not fit memory."""
    setting = parse_scenario(scenario(name, tp, stages, groups, prompt, chunk, output))
    work = requests_of(setting.workload, None, 0)
    spec = replace(instance_of(setting, work), latency=machine(name, stages, mode, tp=tp).latency)
    result = simulate(spec, work, run_of(setting, 0, keep_iterations=True))
    (record,) = result.records
    # Iterations of the prefill; the others are decodes only.
    rows = [row for row in result.iterations if row.chunks]
    first_s = metrics.ttft_s(record)
    assert first_s is not None
    assert record.ok
    gaps = metrics.tbt_s(record)
    return KvpServedResult(
        ttft_s=first_s,
        tbt_s=float(np.median(gaps)) if output > 1 else None,
        began_s=tuple(row.stages[0][0] for row in rows),
        through_s=tuple(row.done_s - row.stages[0][0] for row in rows),
        groups=tuple(len(row.groups) for row in rows),
        joins=result.replicas[0].joins,
    )


def served_tbt_s(name: str, stages: int, context: int, groups: int, mode: Mode) -> float:
    """Return the TBT in seconds of one decode over `context` tokens on TP8, after a prefill in chunks of 4096."""
    found = served(name, 8, stages, groups, context, PREFILL_CHUNK, mode, TOKENS).tbt_s
    assert found is not None
    return found


# -- decode ------------------------------------------------------------------------------------------------------------


GROUPS = (1, 2, 4)
DECODED = (4_000_000, 10_000_000)
PAIR_TBT_S, PAIR_SAVED = 1 / 30, 0.4
"""Two KV groups at 10M tokens (Medha Fig. 7): about 30 tokens a second, almost 40% off."""
WHY = "Paper mode has the engine's overhead that the paper's own pair implies, default mode none (see the module)."
STAGES = {"llama-3-8b": 4, "llama-3-70b": 8}


def tbt_s(name: str, context: int, groups: int, mode: Mode) -> float:
    """Return the TBT of one decode alone on TP8, with the paper's number of stages for this model."""
    engine = engine_s() if mode == "paper" else 0.0
    return served_tbt_s(name, STAGES[name], context, groups, mode) + engine


def implied() -> tuple[float, float]:
    """Return (attention, rest) of a decode over 10M tokens by the paper's pair, T(k) = A / k + B, in seconds."""
    one_s = PAIR_TBT_S / (1 - PAIR_SAVED)
    attention_s = 2 * (one_s - PAIR_TBT_S)
    return attention_s, one_s - attention_s


def engine_s() -> float:
    """Return what the paper's engine spends on a token beside what the fit has, in seconds."""
    m = machine("llama-3-8b", STAGES["llama-3-8b"], "default")
    return implied()[1] - (m.tbt_s(10_000_000) - m.stages * m.latency.decode_s(1, 10_000_000))


def saved(name: str, context: int, groups: int, mode: Mode) -> float:
    """Return the share of TBT that KV parallelism saves over one group."""
    return 1.0 - tbt_s(name, context, groups, mode) / tbt_s(name, context, 1, mode)


def speedup(name: str, context: int, groups: int, mode: Mode) -> float:
    """Return the ratio of TBT on one group to TBT on `groups`."""
    return tbt_s(name, context, 1, mode) / tbt_s(name, context, groups, mode)


def _two_at_10m() -> ClaimRow:
    return judge(
        "8B, 10M tokens: two KV groups take so much off the TBT",
        "almost 40%",
        band(0.33, 0.45),
        partial(saved, "llama-3-8b", 10_000_000, 2),
        f"The pair that paper mode's engine is fitted to. {WHY}",
    )


def _proofs() -> list[ClaimRow]:
    """Return what the papers' own numbers imply, by arithmetic alone."""
    device = accelerator("h100")
    kv_bytes = {name: model(name).kv_bytes_per_token for name in STAGES}
    reading_s = 10_000_000 * kv_bytes["llama-3-8b"] / 8 / device.bandwidth
    large = model("llama-3-70b")
    moved = 2_000_000 * kv_bytes["llama-3-70b"] + large.parameters * large.dtype_bytes
    least = {f"{share:.0%}": moved / 8 / device.bandwidth / share for share in (1.0, 0.92)}
    attention_s, rest_s = implied()
    return [
        judge_same(
            "8B, 10M tokens: reading the KV at the data sheet's bandwidth over the attention that the pair implies",
            None,
            at_least(1.0),
            reading_s / attention_s,
            f"{reading_s * 1e3:.1f} ms against {attention_s * 1e3:.1f}: 30 a second and 40% hold only as 'about'.",
        ),
        judge_same(
            "8B, 10M tokens: seconds of a token that are not attention, by the pair, over those of the fit",
            None,
            at_least(2.0),
            rest_s / (rest_s - engine_s()),
            f"{rest_s * 1e3:.1f} ms against {(rest_s - engine_s()) * 1e3:.1f}: the paper's engine.",
        ),
        judge_same(
            "70B, 2M tokens: reading weights and KV once on 8 H100s at the paper's own 92% of bandwidth, seconds",
            None,
            at_least(0.030),
            least["92%"],
            f"At 100% of bandwidth {least['100%'] * 1e3:.1f} ms: 30 ms leave nothing for anything else.",
        ),
    ]


def _rate(groups: int) -> ClaimRow:
    return judge(
        f"8B, 10M tokens, {groups} KV groups: tokens a second",
        "~30",
        at_least(27.0),
        lambda mode: 1.0 / tbt_s("llama-3-8b", 10_000_000, groups, mode),
        f"One-sided: faster also holds. {WHY}",
    )


def _equation() -> ClaimRow:
    """Compare the simulated TBT with Mnemosyne's Eq. 9."""

    def furthest(mode: Mode) -> float:
        m = machine("llama-3-8b", STAGES["llama-3-8b"], mode)
        off = [
            served_tbt_s("llama-3-8b", m.stages, context, k, mode) / m.tbt_s(context, groups=k)
            for context in DECODED
            for k in GROUPS
        ]
        return max(off, key=lambda ratio: abs(ratio - 1.0))

    return judge(
        "8B, 4M and 10M tokens, 1 to 4 KV groups: TBT as served over Mnemosyne's Eq. 9, the furthest",
        None,
        band(0.95, 1.05),
        furthest,
        "Headway's own check: the exchange between groups and the tokens of the last shard are what differs.",
    )


def _report(rows: list[ClaimRow], *more: ReportChart) -> ExperimentReport:
    lines = {
        f"{name}, {context // 1_000_000}M": [(float(k), tbt_s(name, context, k, "paper")) for k in GROUPS]
        for name in STAGES
        for context in DECODED
    }
    panel = ReportChart(title="Decode alone, paper mode", x="KV groups", y="TBT, s", lines=lines)
    machines = [machine(name, stages, mode) for name, stages in STAGES.items() for mode in MODES]
    setting = (
        "one request, simulated: prefill, then decode; TP8, 4 stages (8B) or 8 (70B), H100, equal shards, KV groups "
        "between nodes"
    )
    shown = scenario("llama-3-8b", 8, STAGES["llama-3-8b"], 2, 10_000_000, PREFILL_CHUNK, TOKENS)
    return lone_report(setting, machines, rows, panel, *more, as_scenario_file=shown)


def fig7(options: RunOptions) -> ExperimentReport:
    """Reproduce Medha Fig. 7: a) decode alone, b) batched with a chunk."""

    context, chunk = (200_000 if options.quick else 4_000_000), 128

    def mixed(mode: Mode) -> dict[str, float]:
        found = {k: served("llama-3-8b", 8, 4, k, context, chunk, mode) for k in GROUPS}
        return {str(k): one.through_percentile_s(95) for k, one in found.items()}

    rows = [
        _two_at_10m(),
        _rate(2),
        judge(
            f"8B: TBT beside a prefill of {context:,} tokens in chunks of {chunk}, P95 of its batches, by KV groups, "
            "seconds",
            "falls",
            descending("falls"),
            mixed,
        ),
        judge(
            "The same without KV groups, seconds",
            "almost 0.1 (Mnemosyne §4.4)",
            band(0.05, 0.13),
            lambda mode: mixed(mode)["1"],
        ),
        _equation(),
    ]
    lines = {f"{mode} mode": [(float(k), value) for k, value in mixed(mode).items()] for mode in MODES}
    return _report(rows, ReportChart(title=f"Beside chunks of {chunk}", x="KV groups", y="P95 TBT, s", lines=lines))


def fig19(options: RunOptions) -> ExperimentReport:
    """Reproduce Medha Fig. 19 and App. B.2."""
    rows = [
        _two_at_10m(),
        _rate(2),
        judge(
            "App. B.2: 8B, 10M tokens: degree 4 takes so much off the TBT",
            "40% (contradicts Fig. 19, which says degree 2)",
            band(0.35, 0.45),
            partial(saved, "llama-3-8b", 10_000_000, 4),
            "With attention four times the rest, degree 2 gives 40% and degree 4 gives 60%.",
        ),
        _equation(),
    ]
    return _report(rows)


def fig17(options: RunOptions) -> ExperimentReport:
    """Reproduce Mnemosyne Fig. 17 and §6.3."""
    rows = [
        _two_at_10m(),
        judge(
            "8B, 4M tokens: four KV groups, TBT improves by",
            "1.7×",
            band(1.4, 2.0),
            partial(speedup, "llama-3-8b", 4_000_000, 4),
            WHY,
        ),
        judge(
            "8B, 10M tokens: four KV groups, TBT improves by",
            "2.5×",
            band(2.1, 2.9),
            partial(speedup, "llama-3-8b", 10_000_000, 4),
            WHY,
        ),
    ]
    rows += _proofs()
    for name, context in (("llama-3-8b", 4_000_000), ("llama-3-70b", 2_000_000)):
        rows.append(
            judge(
                f"{name}: one KV group meets 30 ms up to {context // 1_000_000}M tokens: TBT there, seconds",
                "<= 0.030",
                band(0.0, 0.030),
                partial(tbt_s, name, context, 1),
                WHY,
            )
        )
    return _report(rows)


def amdahl(options: RunOptions) -> ExperimentReport:
    """With attention : rest = 4 : 1 at 10M tokens, T(k) = A / k + B gives the papers' figures."""

    def time(k: int, attention: float = 4.0) -> float:
        return attention / k + 1.0

    def attention_to_rest(mode: Mode) -> float:
        m = machine("llama-3-8b", STAGES["llama-3-8b"], mode)
        attention_s = m.stages * m.latency.decode_s(1, 10_000_000)
        return attention_s / (m.tbt_s(10_000_000) - attention_s)

    rows = [
        judge_same("Two KV groups: T(2) / T(1)", "0.6 (40% off)", exact(0.6), time(2) / time(1)),
        judge_same("Four KV groups: T(1) / T(4)", "2.5×", exact(2.5), time(1) / time(4)),
        judge_same(
            "The same at 4M tokens (attention 0.4 as long): T(1) / T(4)",
            "1.7×",
            band(1.6, 1.9),
            time(1, 1.6) / time(4, 1.6),
        ),
        judge(
            "8B at 10M tokens by the fit: attention over everything else in a decode",
            "4 (implied)",
            band(3.0, 5.0),
            attention_to_rest,
            WHY,
        ),
    ]
    return _report(rows)


# -- the trade-off, and how groups join --------------------------------------------------------------------------------


CHUNKS = (32, 64, 128, 256)
TRADED = (1_000_000, 2_000_000, 4_000_000)
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
        for context in TRADED
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
