"""The one setting of PecSched's figures (§6.2): four models on 4 × 8 A100, a node's network 400 Gb/s. Nothing is tuned
per figure.

Times of iterations: operator fits of the A100 (`perf.latency.fitted`); of long prefills: fast SP's corrected formulas
at the roofline's shares of peak. 4, 4, 1 and 1 replicas decode short requests under PecSched; its peers use them as any
other. 5% of the requests are long, as §6.2 says ("above the 95th percentile").

Two things the paper leaves open or states twice, so that every claim is judged under each:

The load. §6.2 takes the arrival times of "the Azure trace". Its references [21] and [22] are the trace of 2024, 72.8
requests a second; its statistics ("80% below 2K", outputs "under 800") are those of the trace of 2023, 8.05 a second,
and its longest input (9K) is of neither. With 5% long requests both ask for more than 32 GPUs compute.

The replicas of a long request. "GPU resources capable of handling requests of 500K tokens" are 2, 3, 1 and 1 replicas
by memory. "Fewer GPUs are reserved for short requests than for long ones" (§6.3) and the throughput that Reservation
leaves to short requests imply 22, 24, 7 and 7: a fit to Fig. 3, and named so.

Regimes:

0.8          5% long, so many requests that all ask 0.8 of what the replicas compute; 22, 24, 7, 7 replicas
0.8, memory  the same load; as many replicas as memory needs
2023         8.05 requests a second, lengths of 2023; 22, 24, 7, 7 replicas
2024         72.8 requests a second, lengths of 2024; 22, 24, 7, 7 replicas

Requests are drawn (Azure's lengths up to P95; 100K to 500K uniform; Poisson), three seeds. Queueing delay counts to the
end of the window for requests that have not begun; JCT likewise, over long requests of the window's first half.
Starved: never begun, of those that came in the first two thirds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean
from typing import Any, Literal, NamedTuple

import numpy as np

from headway.core.errors import ConfigError
from headway.perf.latency.groups import GroupShape
from headway.sim.cluster.build import cluster_of, run_cluster
from headway.sim.cluster.state import ClusterResult, ClusterSpec
from headway.sim.scenario import parse_scenario
from headway.sim.workload import TraceRequest
from headway.sim.workload.generate import ConstantArrivals, preset
from headway_research.base import MODES, Mode, RunOptions, SimulationCache, source

Regime = Literal["0.8", "0.8, memory", "2023", "2024", "unsaturated", "busy"]
REGIMES: tuple[Regime, ...] = ("0.8", "0.8, memory", "2023", "2024")
SERVED: tuple[Regime, ...] = REGIMES[:3]
"""Regimes for figures of long requests: under the load of 2024 none ends."""
LONG_SHARE = 0.05
LOAD = 0.8
LOADS: dict[Regime, tuple[float, float]] = {"unsaturated": (0.5, 0.3), "busy": (0.9, 0.1)}
"""Loads of short and long requests, of the comparison with our own policy (`combined`) only."""
TRACES: dict[Regime, tuple[float, str]] = {"2023": (8.05, "pecsched-short"), "2024": (72.8, "pecsched-short-2024")}
"""Requests a second of a trace, and the preset of its short requests."""
WINDOWS_S: dict[Regime, float] = {"2023": 150.0, "2024": 30.0}
LONGS = 40
"""Expected long requests of a run at `LOAD`: its window is as long as they take to come."""
# percentiles of the queueing delay that are kept
CUTS = (1, 25, 50, 75, 99)
SEEDS = (0, 1, 2)
QUICK_S = 20.0


class PecSchedCluster(NamedTuple):
    """A model of Table 5 on 32 GPUs."""

    model: str
    tp: int
    prefill: int
    """Replicas that prefill under PecSched."""
    decode: int
    """Replicas that decode under PecSched."""
    long_sp: int
    """Replicas of a long request, implied by the throughput that Reservation leaves to short ones."""
    memory_sp: int
    """Replicas that hold the KV of 500K tokens."""


MODELS: dict[str, PecSchedCluster] = {
    "Mistral-v0.3 7B": PecSchedCluster("mistral-7b", 1, 28, 4, 22, 2),
    "Phi-3 14B": PecSchedCluster("phi-3-14b", 1, 28, 4, 24, 3),
    "Yi 34B": PecSchedCluster("yi-34b", 4, 7, 1, 7, 1),
    "Llama-3.1 70B": PecSchedCluster("llama-3-70b", 4, 7, 1, 7, 1),
}

SYSTEMS: dict[str, tuple[str, dict[str, Any]]] = {
    "FIFO": ("fifo", {}),
    "FIFO, no longs": ("fifo", {}),
    # as the paper sets them up: idle reserved replicas stay idle, and long requests are not promoted
    "Reservation": ("reservation", {"mode": "paper"}),
    "Priority": ("priority", {"mode": "paper"}),
    "PecSched": ("pecsched", {}),
    # ablations (§6.4): without preemption, disaggregation, colocation, fast SP
    "/PE": ("pecsched", {"preempt": False}),
    "/Dis": ("pecsched", {"disaggregate": False}),
    "/CoL": ("pecsched", {"colocate": False}),
    "/FSP": ("pecsched", {"fast_sp": False}),
}
PEERS = ("FIFO", "Reservation", "Priority")
ABLATIONS = ("/PE", "/Dis", "/CoL", "/FSP")


class PecSchedPoint(NamedTuple):
    """The inputs of one simulation. Two runs with equal points have equal results."""

    name: str
    system: str
    mode: Mode
    regime: Regime
    window_s: float
    seed: int


@dataclass(frozen=True)
class PecSchedResult:
    """The figures of one simulation."""

    delay_s: dict[str, float]
    """Queueing delay of short requests, by percentile."""
    short_rps: float
    """Short requests completed, for each second of the window."""
    long_jct_s: float | None
    """Mean JCT of long requests that arrived in the window's first half."""
    starved: float | None
    """Share of long requests never begun, of those that arrived in the first two thirds."""
    unfinished: float | None
    """Share of long requests that did not end, of those that arrived in the first half."""
    idle: float
    """Share of the replicas' time in which nothing was computed."""
    pauses: int
    """Preemptions of long prefills."""
    longs: int
    """Long requests that arrived."""


def scenario(name: str, system: str, mode: Mode, regime: Regime, window_s: float) -> dict[str, Any]:
    """Return a point as a scenario's data, as `headway simulate` takes it."""
    at = MODELS[name]
    placement, changed = SYSTEMS[system]
    options: dict[str, Any] = {"long_sp": replicas(name, regime), **changed}
    # separate decode replicas exist only where PecSched disaggregates; its peers use all replicas for both
    apart = placement == "pecsched" and options.get("disaggregate", True)
    if placement == "pecsched":
        options |= {"mode": mode, "long_replicas": "fixed"}
    pools: list[dict[str, Any]] = [
        {
            "role": "prefill" if apart else "mixed",
            "count": at.prefill + (0 if apart else at.decode),
            "tp": at.tp,
            "per_node": 8 // at.tp,
        }
    ]
    if apart:
        pools.append({"role": "decode", "count": at.decode, "tp": at.tp, "kv_tokens": replica_kv_tokens(name)})
    short_rps, long_rps = _rates(name, regime)
    if system == "FIFO, no longs":
        long_rps = 0.0
    return {
        "name": f"{system}, {name}, {regime}, {mode} mode",
        "model": at.model,
        "cluster": {
            "accelerator": "a100-80gb",
            "placement": placement,
            "options": options,
            "pools": pools,
            "spans": {"source": "fast-sp", "node_gbit_s": 400},
        },
        "latency": {"source": "fitted"},
        "policy": {
            "policy": "fcfs",
            "chunking": "static:4096",
            "max_num_batched_tokens": 4096,
            "max_num_seqs": 256,
            # the unit of "takes many iterations": not the machine's, so that figures are those of one setting
            "t_target_s": 0.055,
            "medha": {"space_sharing": False},
        },
        "workload": {
            "preset": TRACES.get(regime, (0.0, "pecsched-short"))[1],
            "long_share": long_rps / (short_rps + long_rps),
            "long_preset": "pecsched-long",
            "qps": short_rps + long_rps,
        },
        "run": {"window_s": window_s},
    }


def replicas(name: str, regime: Regime) -> int:
    """Return the replicas of a long request."""
    return MODELS[name].memory_sp if regime == "0.8, memory" else MODELS[name].long_sp


def _rates(name: str, regime: Regime) -> tuple[float, float]:
    """Return (short, long) requests a second of a regime."""
    if regime in LOADS:
        work = work_s(name, replicas(name, regime))
        short, long = (load * MODELS[name].prefill / each for load, each in zip(LOADS[regime], work, strict=True))
        return short, long
    if regime in TRACES:
        rps = TRACES[regime][0]
    else:
        # load = rate · replica-seconds of a mean request / replicas that prefill, solved for the rate
        short_s, long_s = work_s(name, replicas(name, regime))
        rps = LOAD * MODELS[name].prefill / ((1 - LONG_SHARE) * short_s + LONG_SHARE * long_s)
    return rps * (1 - LONG_SHARE), rps * LONG_SHARE


def asked(name: str, regime: Regime) -> tuple[float, float]:
    """Return what (short, long) requests ask for, over what the replicas that prefill compute."""
    at = MODELS[name]
    work = work_s(name, replicas(name, regime), TRACES.get(regime, (0.0, "pecsched-short"))[1])
    short, long = (rate * seconds / at.prefill for rate, seconds in zip(_rates(name, regime), work, strict=True))
    return short, long


def _spec_of(name: str, pool: dict[str, Any]) -> ClusterSpec:
    """Return a cluster of one pool of a model's replicas."""
    at = MODELS[name]
    cluster = {
        "placement": "fifo",
        "pools": [{"tp": at.tp, **pool}],
        "spans": {"source": "fast-sp", "node_gbit_s": 400},
    }
    data = {
        "model": at.model,
        "cluster": cluster,
        "latency": {"source": "fitted"},
        "workload": {"preset": "pecsched-short"},
    }
    return cluster_of(parse_scenario(data), [TraceRequest(0.0, 1, 1)])


@cache
def replica_kv_tokens(name: str) -> int:
    """Return the KV tokens that a replica's memory holds (one that decodes never gets a long request, either)."""
    return _spec_of(name, {"role": "prefill", "count": 1}).instances[0].capacity


@cache
def work_s(name: str, long_sp: int, shorts_of: str = "pecsched-short") -> tuple[float, float]:
    """Return the replica-seconds of a mean short prefill, and of a mean long one as a plain ring of `long_sp`."""
    at = MODELS[name]
    spans = _spec_of(name, {"count": at.prefill}).spans
    rng = np.random.default_rng(0)
    shorts = preset(shorts_of).draw(rng, ConstantArrivals(1.0), 2000)
    # an even grid instead of draws: the mean over 100K to 500K uniform
    lengths = np.linspace(100_000, 500_000, 33).astype(int).tolist()
    ring = GroupShape(long_sp, -(-long_sp * at.tp // 8))
    return (
        fmean(spans.prefill_s(0, request.prompt_tokens, GroupShape(1)) for request in shorts),
        # a long prefill occupies all replicas of its ring
        long_sp * fmean(spans.prefill_s(0, tokens, ring) for tokens in lengths),
    )


def measure(result: ClusterResult) -> PecSchedResult:
    """Return the figures of a run."""
    end_s = result.sim.duration_s
    shorts = [record for record in result.sim.records if record.klass == "short"]
    longs = [record for record in result.sim.records if record.klass == "long"]
    # a lower bound for requests that have not begun
    delays = [(end_s if r.scheduled_s is None else r.scheduled_s) - r.arrival_s for r in shorts]
    early = [r for r in longs if r.arrival_s < end_s / 2]
    jct = [(r.finish_s if r.finish_s is not None else end_s) - r.arrival_s for r in early]
    due = [r for r in longs if r.arrival_s < end_s * 2 / 3]
    return PecSchedResult(
        delay_s={f"p{cut}": float(np.quantile(delays, cut / 100)) for cut in CUTS},
        short_rps=sum(record.ok for record in shorts) / end_s,
        long_jct_s=fmean(jct) if jct else None,
        starved=sum(r.scheduled_s is None for r in due) / len(due) if due else None,
        unfinished=sum(r.finish_s is None for r in early) / len(early) if early else None,
        idle=result.sim.idle_share,
        pauses=result.paused,
        longs=len(longs),
    )


def run_point(point: PecSchedPoint) -> PecSchedResult:
    """Simulate a point and return its figures."""
    data = scenario(point.name, point.system, point.mode, point.regime, point.window_s)
    return measure(run_cluster(parse_scenario(data), point.seed))


RESULTS: SimulationCache[PecSchedPoint, PecSchedResult] = SimulationCache()


class PecSchedStudy:
    """The points of a figure; results are shared by all figures of a process."""

    def __init__(self, options: RunOptions, names: Sequence[str] = tuple(MODELS)) -> None:
        self.names = names[-1:] if options.quick else names
        self.seeds = options.seeds or SEEDS
        self._options = options

    def window_s(self, name: str, regime: Regime) -> float:
        """Return the observed seconds of a model's runs."""
        if self._options.window_s or self._options.quick:
            return self._options.window_s or QUICK_S
        return WINDOWS_S.get(regime) or LONGS / _rates(name, regime)[1]

    def _point(self, name: str, system: str, mode: Mode, regime: Regime, seed: int) -> PecSchedPoint:
        """Return the cache key of a point. Only PecSched has modes, so one run of a peer serves both."""
        own: Mode = mode if SYSTEMS[system][0] == "pecsched" else "default"
        return PecSchedPoint(name, system, own, regime, self.window_s(name, regime), seed)

    def ensure(self, systems: Iterable[tuple[str, Mode]], regimes: Iterable[Regime]) -> None:
        """Simulate the points that have no result yet, in `jobs` processes."""
        kinds, loads = list(systems), list(regimes)
        points = (
            self._point(name, system, mode, regime, seed)
            for name in self.names
            for system, mode in kinds
            for regime in loads
            for seed in self.seeds
        )
        RESULTS.ensure(points, run_point, self._options.jobs, self._options.on_progress)

    def value(self, name: str, system: str, mode: Mode, regime: Regime, metric: str, cut: str = "p99") -> float | None:
        """Return the mean of a metric over seeds; None where no seed has it. `cut`: the percentile of `delay_s`."""
        found = []
        for seed in self.seeds:
            point = self._point(name, system, mode, regime, seed)
            if point not in RESULTS:
                raise ConfigError(f"{system} in {regime} was not simulated")
            value = getattr(RESULTS[point], metric)
            value = value[cut] if isinstance(value, dict) else value
            if value is not None:
                found.append(float(value))
        return fmean(found) if found else None

    def values(self, system: str, mode: Mode, regime: Regime, metric: str) -> dict[str, float]:
        """Return a metric by model, without models that have no value."""
        found = {name: self.value(name, system, mode, regime, metric) for name in self.names}
        return {name: value for name, value in found.items() if value is not None}

    def ratios(self, over: str, under: str, mode: Mode, regime: Regime, metric: str) -> dict[str, float]:
        """Return a metric of one system over another's by model, without models where either is missing or the other
        is 0."""
        return _quotients(*(self.values(system, mode, regime, metric) for system in (over, under)))

    def quotients(self, system: str, mode: Mode, regime: Regime, over: str, under: str) -> dict[str, float]:
        """Return one metric over another by model, without models where either is missing or the other is 0."""
        return _quotients(*(self.values(system, mode, regime, metric) for metric in (over, under)))

    def came(self, name: str, regime: Regime) -> tuple[int, ...]:
        """Return the long requests of a model's runs, by seed: the same under every system, and few (a mean of two says
        little)."""
        points = [
            self._point(name, system, mode, regime, seed)
            for seed in self.seeds
            for system in SYSTEMS
            if system != "FIFO, no longs"
            for mode in MODES
        ]
        found = {point.seed: RESULTS[point].longs for point in points if point in RESULTS}
        return tuple(found.values())

    def source(self, regimes: Sequence[Regime], **more: Any) -> dict[str, Any]:
        """Return the `source` of a report."""
        name = self.names[-1]
        return source(
            "fitted: A100 operator profiles; long prefills: fast-SP formulas, corrected, at 0.7 and 0.6 of peak, 6.1% "
            "of attention's rate lost a doubling of the ring (measured on 8 A100, beyond that extrapolated)",
            "4 × 8 A100, 400 Gb/s a node; Azure-like short requests, 100K to 500K uniform long ones; "
            + "; ".join(self._described(regime) for regime in regimes),
            self.seeds,
            self.window_s(name, regimes[0]),
            # how much a mean over them means
            long_requests={regime: {n: list(self.came(n, regime)) for n in self.names} for regime in regimes},
            windows_s={regime: {n: self.window_s(n, regime) for n in self.names} for regime in regimes},
            as_scenario_file=scenario(name, "PecSched", "default", regimes[0], self.window_s(name, regimes[0])),
            **more,
        )

    def _described(self, regime: Regime) -> str:
        """Return a regime in words: replicas of a long request, and what short and long ones ask for, by model."""
        sizes = "/".join(str(replicas(name, regime)) for name in self.names)
        loads = [asked(name, regime) for name in self.names]
        short, long = ("/".join(f"{load[k]:.2g}" for load in loads) for k in (0, 1))
        return f"{regime}: {sizes} replicas a long request, short load {short}, long {long} of what replicas compute"


def _quotients(top: Mapping[str, float], bottom: Mapping[str, float]) -> dict[str, float]:
    return {name: value / bottom[name] for name, value in top.items() if bottom.get(name)}
