"""KV parallelism in decode: Medha Figs. 7 and 19, Mnemosyne Fig. 17, and the Amdahl arithmetic behind them.

Decode-only TBT of one request, and batches of a prefill that decodes may share, as served (`kvp_served`): the request
is prefilled, groups join as its shards fill, then it decodes over all of them. Mnemosyne's Eq. 9 over the same fitted
latencies is given for comparison. Medha's App. B.2 states 40% for degree 4; its Figs. 7 and 19 show it for degree 2,
which agrees with the papers' other numbers.

The engine. By the papers' own pair (two groups decode at about 30 tokens a second, "almost 40%" sooner than one) what
is not attention takes 11 ms a token; the fit has some 3 ms for four stages, so their engine spends about 8 ms more
(§5 of both papers is about it). In paper mode every decode takes `ENGINE_S` more, which is fitted to that pair; the
other figures of Fig. 17 are then predictions. Default mode has the fit alone.
"""

from __future__ import annotations

from functools import partial

from headway.perf.hardware import accelerator, model
from headway.sim.report.page import ReportChart
from headway_research.base import MODES, ClaimRow, ExperimentReport, Mode, RunOptions
from headway_research.medha.arithmetic import lone_report, machine
from headway_research.medha.kvp_served import PREFILL_CHUNK, TOKENS, scenario, served, served_tbt_s
from headway_research.verdicts import at_least, band, descending, exact, judge, judge_same

GROUPS = (1, 2, 4)
CONTEXTS = (4_000_000, 10_000_000)
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
            for context in CONTEXTS
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
        for context in CONTEXTS
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
