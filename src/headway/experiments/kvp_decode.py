"""KV parallelism in decode: Medha Figs. 7 and 19, Mnemosyne Fig. 17, and the Amdahl arithmetic behind them.

Decode-only TBT of one request. The simulator has no KV groups, so this is Mnemosyne's Eq. 9 over the fitted latencies:
attention over k groups, all else as before, plus an all-gather of partial outputs a layer between nodes. Medha's App.
B.2 says that degree 4 gives 40%; its Figs. 7 and 19 say degree 2, which is what follows from the papers' other
numbers.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from headway.experiments.arithmetic import latency_source, machine
from headway.experiments.base import MODES, Mode, Options, Panel, Report, Row
from headway.experiments.verdicts import at_least, band, both, descending, exact, judge

GROUPS = (1, 2, 4)
WHY = (
    "The fit's decode reads KV at 0.93 of the data sheet's bandwidth, as its profile's large reads do, and what is not "
    "attention is short: attention is far more than four times the rest, and KV groups gain more than in the papers."
)
STAGES = {"llama-3-8b": 4, "llama-3-70b": 8}


def tbt_s(name: str, context: int, groups: int, mode: Mode) -> float:
    """One decode alone: TP8, the paper's stages for this model."""
    return machine("h100", name, 8, STAGES[name], mode).tbt_s(context, groups=groups)


def saved(name: str, context: int, groups: int, mode: Mode) -> float:
    """Share of TBT that KV parallelism takes away."""
    return 1.0 - tbt_s(name, context, groups, mode) / tbt_s(name, context, 1, mode)


def speedup(name: str, context: int, groups: int, mode: Mode) -> float:
    """TBT without over TBT with."""
    return tbt_s(name, context, 1, mode) / tbt_s(name, context, groups, mode)


def _two_at_10m() -> Row:
    return judge(
        "8B, 10M tokens: two KV groups take so much off the TBT",
        "almost 40%",
        band(0.33, 0.45),
        both(partial(saved, "llama-3-8b", 10_000_000, 2)),
        WHY,
    )


def _rate(groups: int) -> Row:
    return judge(
        f"8B, 10M tokens, {groups} KV groups: tokens a second",
        "~30",
        at_least(27.0),
        both(lambda mode: 1.0 / tbt_s("llama-3-8b", 10_000_000, groups, mode)),
        f"One-sided: faster also holds. {WHY}",
    )


def _report(rows: list[Row], longest: int = 10_000_000) -> Report:
    lines = {
        f"{name}, {context // 1_000_000}M": [(float(k), tbt_s(name, context, k, "paper")) for k in GROUPS]
        for name in STAGES
        for context in (4_000_000, longest)
    }
    panel = Panel(title="Decode alone, paper mode", x="KV groups", y="TBT, s", lines=lines)
    machines = [machine("h100", name, 8, stages, mode) for name, stages in STAGES.items() for mode in MODES]
    scenario = "one decode; TP8, 4 stages (8B) or 8 (70B), H100, KV groups between nodes; arithmetic (Mnemosyne Eq. 9)"
    return Report(source=latency_source(*machines, scenario=scenario), rows=tuple(rows), panels=(panel,))


def fig7(options: Options) -> Report:
    """Medha Fig. 7: a) decode alone, b) beside a chunk."""

    def mixed(groups: int, mode: Mode) -> float:
        m = machine("h100", "llama-3-8b", 8, 4, mode)
        return m.tbt_s(4_000_000, chunk=128, groups=groups, chunk_past=4_000_000)

    rows = [
        _two_at_10m(),
        _rate(2),
        judge(
            "8B: TBT of a decode beside a chunk of 128, both over 4M tokens, by KV groups, seconds",
            "falls",
            descending("falls"),
            both(lambda mode: {str(k): mixed(k, mode) for k in GROUPS}),
        ),
    ]
    return _report(rows)


def fig19(options: Options) -> Report:
    """Medha Fig. 19 and App. B.2."""
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
    ]
    return _report(rows)


def fig17(options: Options) -> Report:
    """Mnemosyne Fig. 17 and §6.3."""
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


def amdahl(options: Options) -> Report:
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
