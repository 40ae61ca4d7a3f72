"""The one setting of Medha's policy figures (1, 9, 10, 13 and the headlines). Nothing is tuned per figure.

Llama-3 8B on 16 A100-80GB as TP8 × two stages; ShareGPT-like chats, a share of them replaced by Medha-SWE's long
requests (100K to 1M, P50 393K, P90 839K); Poisson arrivals; window 1,800 s. TTFT deadline without an
SLO d = max(1 s, 5·w) with w the isolated prefill time (the paper never defines it). The TBT aimed at is 40 ms.

A stage's time is that over the stages in paper mode (20 ms, Medha §4.2), and over the stages + 1 in default mode: a
token that leaves the last stage may find the first one busy with another batch for up to one stage's time, then passes
all of them. So the paper's division bounds a gap by (stages + 1) / stages of what was aimed at, ours by what was.

paper and default mode are the scheduler's own modes: rho_max 0.4 and rho_min 0 beside 0.7 and 0.2, and what else
`SchedulerConfig.named` says. Policies other than Medha's keep everything but the order and space sharing.

`CAPACITY_SETTING` is the same with what §6.2 says of its capacity evaluation: long requests of 128K to 1M tokens and a
window of 60 minutes. The headlines are judged in it; the other figures state neither.

Seeds 0, 1, 2 in Fig. 1, whose claims are ratios of two systems; the first one in figures of many rates and policies.

Longs offer more work than the machine has from about 0.75 QPS on: figures at higher rates are transients of the
window. A request that has no first token when the window ends counts with the time it has waited, a lower bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any, NamedTuple

from headway.sim import metrics
from headway.sim.build import run_scenario
from headway.sim.metrics import percentiles
from headway.sim.report.page import ReportChart
from headway.sim.result import SimResult
from headway.sim.scenario import parse_scenario
from headway_research.base import MODES, ClaimRow, Mode, RunOptions, SimulationCache, source
from headway_research.verdicts import VerdictRule, judge

WINDOW_S = 1800.0
QUICK_WINDOW_S = 15.0
SEEDS = (0, 1, 2)
QPS = (0.25, 0.75, 1.25, 1.75)
# TP8 × two stages; `stage_target_s` divides by it
STAGES = 2
# the gap between tokens that stages are sized for
TBT_S = 0.040
LONG_SHARE = 0.05
ENOUGH_S = 10.0
"""Longest P90 of TTFT with which a rate is carried (§6.4: "maintains the P90 latency under 10 seconds")."""

# Medha's rules without space sharing: at most one long prompt in an iteration.
PLAIN = {"space_sharing": False}
SYSTEMS: dict[str, dict[str, Any]] = {
    "FCFS": {"policy": "fcfs", "medha": PLAIN},
    "EDF": {"policy": "edf", "medha": PLAIN},
    "LRS": {"policy": "lrs", "medha": PLAIN},
    "SRPT": {"policy": "srpt", "medha": PLAIN},
    "LARS": {"policy": "lars", "medha": PLAIN},
    "Medha": {"policy": "lars", "medha": {}},
    "Sarathi-512": {"policy": "fcfs", "chunking": "static:512", "pipeline_schedule": "microbatch", "medha": PLAIN},
    "Sarathi-2048": {"policy": "fcfs", "chunking": "static:2048", "pipeline_schedule": "microbatch", "medha": PLAIN},
    "non-preemptive": {"policy": "fcfs", "chunking": "whole", "medha": PLAIN},
    "ladder": {"policy": "ladder"},
    "LoongServe": {},
    "LoongServe+Reserv": {},
}
"""FCFS to LARS: Medha's mechanisms under another order, without multi-prefill batching. Sarathi: TP8-PP2, static
chunks, a prompt's next chunk waits until the previous one has left all stages. non-preemptive: whole prompts in order
of arrival on two instances of TP8, an approximation of LoongServe (no elastic parallelism, no separate decode pool).
ladder: Headway's default, which is not the paper's, under the same targets; in default mode only.

LoongServe: the policy of that name over eight instances of TP2 (Medha §6.2's TP-2, and §6.5's eight CP instances), in
its own modes; +Reserv: two of them for prompts below 8,192 tokens (§6.5)."""

CLUSTERS: dict[str, dict[str, Any]] = {"LoongServe": {}, "LoongServe+Reserv": {"reserved": 2, "short_tokens": 8192}}


def stage_target_s(mode: Mode) -> float:
    """Return the seconds that a stage may take so that a gap between tokens is at most `TBT_S`.

    Paper mode divides by the stages, as Medha §4.2 does; default mode by the stages + 1 (see the module).
    """
    return TBT_S / (STAGES if mode == "paper" else STAGES + 1)


class AtRate(NamedTuple):
    """A system at a rate, with a share of long requests."""

    system: str
    qps: float
    share: float = LONG_SHARE


class MedhaPoint(NamedTuple):
    """The inputs of one simulation. Two runs with equal points have equal results."""

    setting: str
    system: str
    mode: Mode
    qps: float
    long_share: float
    window_s: float
    seed: int


@dataclass(frozen=True)
class MedhaResult:
    """The figures of one simulation. Times in seconds, by name of percentile."""

    ttft_s: dict[str, float | None]
    """Times to first token of all requests; where there is none, the time from arrival to the window's end."""
    short_ttft_s: dict[str, float | None]
    """The same of short requests."""
    tpot_s: dict[str, float | None]
    max_tbt_s: dict[str, float | None]
    """Worst gap of each completed request."""
    requests: int
    completed: int
    soon: float
    """Share of requests whose first token came within `ENOUGH_S`."""
    in_time: float
    """Share of requests whose first token came before it was due."""
    longs_done: float | None
    """Share of long requests that completed; None without any."""


def scenario(system: str, mode: Mode, qps: float, long_share: float, window_s: float) -> dict[str, Any]:
    """Return the setting as a scenario's data, as `headway simulate` takes it."""
    if system in CLUSTERS:
        return _cluster(system, mode, qps, long_share, window_s)
    policy = {
        "mode": mode,
        "t_target_s": stage_target_s(mode),
        "max_num_seqs": 512,
        **SYSTEMS[system],
    }
    whole = system == "non-preemptive"
    data: dict[str, Any] = {
        "name": f"{system}, {mode} mode, {qps:g} QPS, {long_share:.0%} long",
        "cluster": {"accelerator": "a100-80gb", "replicas": 2 if whole else 1},
        "model": "llama-3-8b",
        "layout": {"tp": 8, "stages": 1 if whole else STAGES},
        "latency": {"source": "fitted"},
        "policy": policy,
        "workload": {"preset": "sharegpt-like", "long_share": long_share, "qps": qps, "arrivals": "poisson"},
        "run": {"window_s": window_s, "deadline_is_target": True},
    }
    if whole:
        # activations of a whole prompt are left out: they would not fit
        data["memory"] = {"kv_tokens": 4_000_000}
    return data


def capacity_scenario(system: str, mode: Mode, qps: float, long_share: float, window_s: float) -> dict[str, Any]:
    """Return the setting with the long requests of §6.2, 128K to 1M tokens."""
    data = scenario(system, mode, qps, long_share, window_s)
    return data | {"workload": data["workload"] | {"long_preset": "medha-swe-128k"}}


def _cluster(system: str, mode: Mode, qps: float, long_share: float, window_s: float) -> dict[str, Any]:
    """Return the scenario of a LoongServe system.

    Spans take the time of one instance's fitted latency on a ring (`perf.latency.groups`); KV as memory allows, but for
    the activations of whole prompts.
    """
    data = scenario("FCFS", mode, qps, long_share, window_s)
    del data["layout"]
    data |= {
        "name": f"{system}, {mode} mode, {qps:g} QPS, {long_share:.0%} long",
        "cluster": {
            "accelerator": "a100-80gb",
            "placement": "loongserve",
            "options": {"mode": mode, **CLUSTERS[system]},
            "pools": [{"role": "mixed", "count": 8, "tp": 2, "per_node": 4}],
            "masters": "all",
        },
        "policy": {"policy": "fcfs", "max_num_seqs": 512, "t_target_s": 0.055, "medha": PLAIN},
    }
    return data


def measure(result: SimResult) -> MedhaResult:
    """Return the figures of a run."""
    end_s = result.duration_s
    waits: dict[str, list[float]] = {"short": [], "long": []}
    done = {"short": 0, "long": 0}
    soon = in_time = 0
    for record in result.records:
        first = metrics.ttft_s(record)
        # a lower bound for requests still without a first token
        waits[record.klass].append(first if first is not None else end_s - record.arrival_s)
        done[record.klass] += record.ok
        soon += first is not None and first <= ENOUGH_S
        in_time += first is not None and first <= (record.slo.ttft_s or 0.0)
    ok = [record for record in result.records if record.ok]
    return MedhaResult(
        ttft_s=percentiles(waits["short"] + waits["long"]),
        short_ttft_s=percentiles(waits["short"]),
        tpot_s=percentiles(map(metrics.tpot_s, ok)),
        max_tbt_s=percentiles(max(metrics.tbt_s(record), default=None) for record in ok),
        requests=len(result.records),
        completed=len(ok),
        soon=soon / len(result.records),
        in_time=in_time / len(result.records),
        longs_done=done["long"] / len(waits["long"]) if waits["long"] else None,
    )


@dataclass(frozen=True)
class MedhaSetting:
    """The parameters of a family of points."""

    name: str
    make: Callable[[str, Mode, float, float, float], dict[str, Any]]
    """Returns a point's scenario from (system, mode, QPS, long share, window); a function of a module, so that it can
    be sent to other processes."""
    systems: Mapping[str, Mapping[str, Any]]
    """Policy settings by name of the system."""
    shown: str
    """The system whose scenario a report shows."""
    latency: str
    """Source of the latencies, for reports."""
    description: str
    """The scenario in words, for reports."""
    window_s: float = WINDOW_S


POLICY_SETTING = MedhaSetting(
    name="policies",
    make=scenario,
    systems=SYSTEMS,
    shown="Medha",
    latency="fitted: A100 operator profiles (headway.perf.latency, a100-80gb), history measured up to 4,032; longer "
    "contexts extrapolated",
    description="Llama-3 8B, 16 A100-80GB, TP8 × 2 stages, ShareGPT-like chats and Medha-SWE longs, Poisson; "
    f"deadline max(1 s, 5·w); stage target {stage_target_s('paper'):g} s (paper mode) and "
    f"{stage_target_s('default'):.4g} s (default mode); rho_min 0 (paper mode) and 0.2 (default mode)",
)

CAPACITY_SETTING = replace(
    POLICY_SETTING,
    name="capacity",
    make=capacity_scenario,
    description=f"{POLICY_SETTING.description}; longs of 128K to 1M, a window of 60 minutes (§6.2)",
    window_s=3600.0,
)


def run_point(setting: MedhaSetting, point: MedhaPoint) -> MedhaResult:
    """Simulate a point and return its figures."""
    data = setting.make(point.system, point.mode, point.qps, point.long_share, point.window_s)
    return measure(run_scenario(parse_scenario(data), point.seed).sim)


RESULTS: SimulationCache[MedhaPoint, MedhaResult] = SimulationCache()


class MedhaStudy:
    """The points of a figure, by system, rate, share, mode and seed; all figures of a process share results."""

    def __init__(
        self, options: RunOptions, setting: MedhaSetting = POLICY_SETTING, seeds: tuple[int, ...] = SEEDS[:1]
    ) -> None:
        """seeds: where the options name none."""
        self.setting = setting
        self.window_s = options.window_s or (QUICK_WINDOW_S if options.quick else setting.window_s)
        self.seeds = options.seeds or (seeds[:1] if options.quick else seeds)
        self.qps = (QPS[0], QPS[2]) if options.quick else QPS
        self._options = options

    @property
    def first_seed(self) -> MedhaStudy:
        """The same study with the first seed only, for systems that are slow to simulate."""
        return MedhaStudy(replace(self._options, seeds=self.seeds[:1]), self.setting)

    def ensure(self, systems: Iterable[tuple[str, Mode]], qps: Iterable[float], shares: Iterable[float]) -> None:
        """Simulate the points that have no result yet, in `jobs` processes."""
        points = (
            self._point(AtRate(system, rate, share), mode, seed)
            for system, mode in systems
            for rate in qps
            for share in shares
            for seed in self.seeds
        )
        RESULTS.ensure(points, partial(run_point, self.setting), self._options.jobs, self._options.on_progress)

    def _point(self, at: AtRate, mode: Mode, seed: int) -> MedhaPoint:
        """Return the cache key of a point. Chunks of a fixed size do not depend on the mode, so one run serves both."""
        by_time = "chunking" not in self.setting.systems[at.system]
        own: Mode = mode if by_time else "default"
        return MedhaPoint(self.setting.name, at.system, own, at.qps, at.share, self.window_s, seed)

    def results(self, at: AtRate, mode: Mode) -> list[MedhaResult]:
        """Return the results of a point, one for each seed, in order."""
        return [RESULTS[self._point(at, mode, seed)] for seed in self.seeds]

    def value(self, at: AtRate, mode: Mode, metric: str = "ttft_s", cut: str = "p50") -> float | None:
        """Return the median over seeds of a figure, of times a percentile; None where no request has it."""
        found = [getattr(m, metric) for m in self.results(at, mode)]
        found = [value[cut] if isinstance(value, Mapping) else value for value in found]
        found = [value for value in found if value is not None]
        return float(median(found)) if found else None

    def ratio(self, over: AtRate, under: AtRate, mode: Mode, metric: str = "ttft_s", cut: str = "p50") -> float | None:
        """Return the value of one point over that of another; None where either has none, or the other's is 0."""
        top, bottom = (self.value(at, mode, metric, cut) for at in (over, under))
        return top / bottom if top is not None and bottom else None

    def judge(
        self,
        claim: str,
        paper: Any,
        check: VerdictRule,
        find: Callable[..., Any],
        note: str = "",
        *,
        approximate: bool = False,
    ) -> ClaimRow:
        """Return `verdicts.judge` of the value of `find`, which takes a mode, with its range over single seeds in
        `why`."""
        ours: dict[Mode, Any] = {mode: find(mode=mode) for mode in MODES}
        why = " ".join(part for part in (self._spread(find), note) if part)
        return judge(claim, paper, check, ours, why, approximate=approximate)

    def _spread(self, find: Callable[..., Any]) -> str:
        """Return the range of `find` over single seeds in each mode, as a sentence; empty for one seed."""
        if len(self.seeds) == 1:
            return ""
        every, found = self.seeds, []
        try:
            for seed in every:
                # `find` reads the seeds through `results`
                self.seeds = (seed,)
                found.append({mode: find(mode=mode) for mode in MODES})
        finally:
            self.seeds = every
        parts = (f"{mode} mode {_ends([one[mode] for one in found])}" for mode in MODES)
        return f"Over seeds {', '.join(map(str, every))}: {'; '.join(parts)}."

    def chart(
        self,
        title: str,
        lines: Mapping[str, Iterable[tuple[float, float | None]]],
        x: str = "QPS",
        y: str = "seconds",
        log_y: bool = True,
    ) -> ReportChart:
        """Return a panel; a point without a value is drawn at 0."""
        drawn = {label: [(at, value or 0.0) for at, value in line] for label, line in lines.items()}
        return ReportChart(title=title, x=x, y=y, log_y=log_y, lines=drawn)

    def source(self, **more: Any) -> dict[str, Any]:
        """Return the `source` of a report."""
        shown = self.setting.make(self.setting.shown, "default", self.qps[-1], LONG_SHARE, self.window_s)
        return source(
            self.setting.latency, self.setting.description, self.seeds, self.window_s, as_scenario_file=shown, **more
        )


def _ends(found: list[Any]) -> str:
    """Return "least to most" of values; of mappings, key by key."""
    if isinstance(found[0], Mapping):
        return ", ".join(f"{key} {_ends([one[key] for one in found])}" for key in found[0])
    known = [float(value) for value in found if value is not None]
    return f"{min(known):.4g} to {max(known):.4g}" if known else "none"
