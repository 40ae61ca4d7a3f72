"""Medha's headline numbers: 5× capacity, 5.7× throughput, and 250 ms for chunks of 512 near 1M tokens (§2.6).

Capacity by the criterion of §6.4: the highest rate of the paper's grid at which the P90 of TTFT stays under 10 seconds
with 5% long requests. The baselines are all of §6.1: LoongServe, Sarathi with chunks of 512 and 2048, Medha in order of
arrival. One that misses the criterion at the grid's lowest rate counts with that rate, so that the ratio is a lower
bound; one that meets it at the highest counts with the highest.

Throughput (abstract): neither a rate nor a measure is said. Two measures are shown at the ends of the grid: requests
that ended within the window, and those with a first token within §6.4's 10 seconds.
"""

from __future__ import annotations

from headway.sim.report.page import ReportChart
from headway_research.base import MODES, ExperimentReport, Mode, RunOptions
from headway_research.medha.arithmetic import PAPER_KERNEL, machine
from headway_research.medha.setting import CAPACITY_SETTING, ENOUGH_S, LONG_SHARE, AtRate, MedhaStudy
from headway_research.verdicts import at_least, band, judge, only, order

BASELINES = ("LoongServe", "FCFS", "Sarathi-512", "Sarathi-2048")
CHUNK, HISTORY = 512, 1_000_000
GAIN = 5.7


class Headlines:
    """Capacities and throughputs, simulated as far as the search needs."""

    def __init__(self, options: RunOptions) -> None:
        self.runs = MedhaStudy(options, CAPACITY_SETTING)

    def ttft_s(self, system: str, mode: Mode, qps: float) -> float:
        """Return the P90 of TTFT in seconds."""
        self.runs.ensure([(system, mode)], [qps], [LONG_SHARE])
        return self.runs.value(AtRate(system, qps), mode, cut="p90") or 0.0

    def capacity(self, system: str, mode: Mode) -> float:
        """Return the highest rate of the grid that a system carries; 0: not even the lowest."""
        # Medha is looked for from above, its baselines from below: either way few rates are simulated
        if system == "Medha":
            return next((qps for qps in reversed(self.runs.qps) if self.ttft_s(system, mode, qps) <= ENOUGH_S), 0.0)
        carried = 0.0
        for qps in self.runs.qps:
            if self.ttft_s(system, mode, qps) > ENOUGH_S:
                break
            carried = qps
        return carried

    def gain(self, mode: Mode) -> float:
        """Return Medha's capacity over the best baseline's."""
        best = max(self.capacity(system, mode) for system in BASELINES)
        return self.capacity("Medha", mode) / (best or self.runs.qps[0])

    def over_loongserve(self, metric: str, mode: Mode) -> dict[str, float]:
        """Return what Medha has of a metric over LoongServe, by rate."""
        rates = (self.runs.qps[0], self.runs.qps[-1])
        self.runs.ensure([("Medha", mode), ("LoongServe", mode)], rates, [LONG_SHARE])

        def of(system: str, qps: float) -> float:
            return self.runs.value(AtRate(system, qps), mode, metric) or 0.0

        return {f"{qps:g} QPS": of("Medha", qps) / max(of("LoongServe", qps), 1e-9) for qps in rates}

    def throughputs(self, mode: Mode) -> dict[str, float]:
        """Return both measures of throughput over LoongServe's, by rate."""
        ended, soon = (self.over_loongserve(metric, mode) for metric in ("completed", "soon"))
        return {f"ended, {at}": value for at, value in ended.items()} | {
            f"within 10 s, {at}": value for at, value in soon.items()
        }


def run(options: RunOptions) -> ExperimentReport:
    """See the module."""
    found = Headlines(options)
    runs = found.runs
    least = {mode: {system: found.ttft_s(system, mode, runs.qps[0]) for system in BASELINES} for mode in MODES}
    shown = ", ".join(f"{system} {value:.0f} s" for system, value in least["default"].items())
    rows = [
        runs.judge(
            "Capacity with 5% long (P90 TTFT under 10 s), Medha over the best baseline",
            "5× higher effective capacity than the baselines (§6.2); P90 under 10 seconds (§6.4)",
            at_least(5.0),
            found.gain,
            f"P90 of TTFT at {runs.qps[0]:g} QPS, default mode: {shown}. Medha carries "
            f"{found.capacity('Medha', 'paper'):g} QPS in paper mode, {found.capacity('Medha', 'default'):g} in "
            f"default mode; the grid ends at {runs.qps[-1]:g}.",
        ),
        runs.judge(
            "Throughput over LoongServe's, 5% long: ended in the window, or first token within 10 s, by rate",
            "5.7× (abstract; neither rate nor measure is said)",
            order("5.7 lies within what measures and rates span", lambda f: min(f.values()) <= GAIN <= max(f.values())),
            found.throughputs,
        ),
        judge(
            "8B on 8 H100s: an iteration with a chunk of 512 over 1M tokens, seconds",
            "~0.25 (§2.6)",
            band(0.2, 0.3),
            only("paper", iteration_s("paper")),
            f"{PAPER_KERNEL}; with FlashAttention-3 {iteration_s('default'):.3f} s.",
        ),
        judge(
            "250 ms for a chunk of 512 over 1M tokens: FLOP/s of attention that it implies, of the peak",
            None,
            band(0.1, 0.2),
            only("paper", implied_share()),
            "At FlashAttention-2's 370 TFLOP/s of 989 it would be 0.37, at the 50 to 60% of Fig. 15 more: 250 ms is "
            "reached by no kernel of that date that the paper's own Fig. 15 allows.",
        ),
    ]
    panel = ReportChart(
        title=f"P90 of TTFT, {LONG_SHARE:.0%} long, at {runs.qps[0]:g} QPS (Medha: {runs.qps[-1]:g})",
        x="0 LoongServe, 1 FCFS, 2, 3 Sarathi, 4 Medha",
        y="seconds",
        log_y=True,
        lines={
            mode: [(float(at), least[mode][system]) for at, system in enumerate(BASELINES)]
            + [(float(len(BASELINES)), found.ttft_s("Medha", mode, runs.qps[-1]))]
            for mode in MODES
        },
    )
    source = runs.source(iteration="H100: fitted, history measured up to 12,416")
    return ExperimentReport(source=source, rows=tuple(rows), panels=(panel,))


def iteration_s(mode: Mode) -> float:
    """Return the seconds of an iteration with a chunk of 512 over 1M tokens, Llama-3 8B on 8 H100s."""
    return machine("llama-3-8b", 1, mode).chunk_s(HISTORY, CHUNK)


def implied_share() -> float:
    """Return the share of peak at which attention alone takes 250 ms."""
    m = machine("llama-3-8b", 1, "paper")
    return m.shape.attention_flops(CHUNK, HISTORY) / 8 / 0.25 / m.device.flops
