"""KV parallelism in decode: Medha Figs. 7 and 19, Mnemosyne Fig. 17, and the Amdahl arithmetic behind them.

Decode-only TBT of one request, and batches of a prefill that decodes may share, as served (`kvp_served`): the request
is prefilled, groups join as its shards fill, then it decodes over all of them. Mnemosyne's Eq. 9 over the same fitted
latencies is given for comparison. Medha's App. B.2 states 40% for degree 4; its Figs. 7 and 19 show it for degree 2,
which agrees with the papers' other numbers.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from headway_research.base import MODES, ClaimRow, ExperimentReport, Mode, PlotPanel, RunOptions
from headway_research.medha.arithmetic import latency_source, machine
from headway_research.medha.kvp_served import PREFILL_CHUNK, TOKENS, scenario, served, served_tbt_s
from headway_research.verdicts import at_least, band, both, descending, exact, judge

GROUPS = (1, 2, 4)
CONTEXTS = (4_000_000, 10_000_000)
WHY = (
    "The fit's decode reads KV at 0.93 of the data sheet's bandwidth, as its profile's large reads do, and what is not "
    "attention is short: attention is far more than four times the rest, and KV groups gain more than in the papers."
)
STAGES = {"llama-3-8b": 4, "llama-3-70b": 8}


def tbt_s(name: str, context: int, groups: int, mode: Mode) -> float:
    """Return the TBT of one decode alone on TP8, with the paper's number of stages for this model."""
    return served_tbt_s(name, STAGES[name], context, groups, mode)


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
        both(partial(saved, "llama-3-8b", 10_000_000, 2)),
        WHY,
    )


def _rate(groups: int) -> ClaimRow:
    return judge(
        f"8B, 10M tokens, {groups} KV groups: tokens a second",
        "~30",
        at_least(27.0),
        both(lambda mode: 1.0 / tbt_s("llama-3-8b", 10_000_000, groups, mode)),
        f"One-sided: faster also holds. {WHY}",
    )


def _equation() -> ClaimRow:
    """Compare the simulated TBT with Mnemosyne's Eq. 9."""

    def furthest(mode: Mode) -> float:
        m = machine("h100", "llama-3-8b", 8, STAGES["llama-3-8b"], mode)
        off = [
            tbt_s("llama-3-8b", context, k, mode) / m.tbt_s(context, groups=k) for context in CONTEXTS for k in GROUPS
        ]
        return max(off, key=lambda ratio: abs(ratio - 1.0))

    return judge(
        "8B, 4M and 10M tokens, 1 to 4 KV groups: TBT as served over Mnemosyne's Eq. 9, the furthest",
        "-",
        band(0.95, 1.05),
        both(furthest),
        "Headway's own check: the exchange between groups and the tokens of the last shard are what differs.",
    )


def _report(rows: list[ClaimRow], *more: PlotPanel) -> ExperimentReport:
    lines = {
        f"{name}, {context // 1_000_000}M": [(float(k), tbt_s(name, context, k, "paper")) for k in GROUPS]
        for name in STAGES
        for context in CONTEXTS
    }
    panel = PlotPanel(title="Decode alone, paper mode", x="KV groups", y="TBT, s", lines=lines)
    machines = [machine("h100", name, 8, stages, mode) for name, stages in STAGES.items() for mode in MODES]
    setting = (
        "one request, simulated: prefill, then decode; TP8, 4 stages (8B) or 8 (70B), H100, equal shards, KV groups "
        "between nodes"
    )
    source = latency_source(*machines, scenario=setting)
    source["as_scenario_file"] = scenario("llama-3-8b", 8, STAGES["llama-3-8b"], 2, 10_000_000, PREFILL_CHUNK, TOKENS)
    return ExperimentReport(source=source, rows=tuple(rows), panels=(panel, *more))


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
            both(mixed),
        ),
        judge(
            "The same without KV groups, seconds",
            "almost 0.1 (Mnemosyne §4.4)",
            band(0.05, 0.13),
            both(lambda mode: mixed(mode)["1"]),
        ),
        _equation(),
    ]
    lines = {f"{mode} mode": [(float(k), value) for k, value in mixed(mode).items()] for mode in MODES}
    return _report(rows, PlotPanel(title=f"Beside chunks of {chunk}", x="KV groups", y="P95 TBT, s", lines=lines))


def fig19(options: RunOptions) -> ExperimentReport:
    """Reproduce Medha Fig. 19 and App. B.2."""
    rows = [
        _two_at_10m(),
        _rate(2),
        judge(
            "App. B.2: 8B, 10M tokens: degree 4 takes so much off the TBT",
            "40% (contradicts Fig. 19, which says degree 2)",
            band(0.35, 0.45),
            both(partial(saved, "llama-3-8b", 10_000_000, 4)),
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
            both(partial(speedup, "llama-3-8b", 4_000_000, 4)),
            WHY,
        ),
        judge(
            "8B, 10M tokens: four KV groups, TBT improves by",
            "2.5×",
            band(2.1, 2.9),
            both(partial(speedup, "llama-3-8b", 10_000_000, 4)),
            WHY,
        ),
    ]
    for name, context in (("llama-3-8b", 4_000_000), ("llama-3-70b", 2_000_000)):
        rows.append(
            judge(
                f"{name}: one KV group meets 30 ms up to {context // 1_000_000}M tokens: TBT there, seconds",
                "<= 0.030",
                band(0.0, 0.030),
                both(partial(tbt_s, name, context, 1)),
                WHY,
            )
        )
    return _report(rows)


def amdahl(options: RunOptions) -> ExperimentReport:
    """With attention : rest = 4 : 1 at 10M tokens, T(k) = A / k + B gives the papers' figures."""
    ratio = 4.0

    def time(k: int, attention: float = ratio) -> float:
        return attention / k + 1.0

    def fixed(value: float) -> dict[Mode, Any]:
        return {"paper": value, "default": value}

    measured = {mode: _attention_to_rest("llama-3-8b", 10_000_000, mode) for mode in MODES}
    rows = [
        judge("Two KV groups: T(2) / T(1)", "0.6 (40% off)", exact(0.6), fixed(time(2) / time(1))),
        judge("Four KV groups: T(1) / T(4)", "2.5×", exact(2.5), fixed(time(1) / time(4))),
        judge(
            "The same at 4M tokens (attention 0.4 as long): T(1) / T(4)",
            "1.7×",
            band(1.6, 1.9),
            fixed(time(1, 0.4 * ratio) / time(4, 0.4 * ratio)),
        ),
        judge(
            "8B at 10M tokens by the fit: attention over everything else in a decode",
            "4 (implied)",
            band(3.0, 5.0),
            measured,
            WHY,
        ),
    ]
    return _report(rows)


def _attention_to_rest(name: str, context: int, mode: Mode) -> float:
    m = machine("h100", name, 8, STAGES[name], mode)
    attention = m.stages * m.latency.decode_s(1, context)
    return attention / (m.tbt_s(context) - attention)
