"""Medha §4.1, the illustrative scenario: a document of 10 s (deadline 16 s), two chats of 0.5 s at t = 5 (due at 6).

The real scheduler, iterations of 10 ms, ten tokens a millisecond and nothing fixed. Paper mode orders only (the
example is about order; space sharing comes in §4.2); default mode is what Headway ships, except that only tokens make a
request long (an iteration of 10 ms would make a long one of everything). The paper states FCFS's outcome, EDF's start
and what LARS is for; the finish times of the others are what follows by hand (within two iterations).
"""

from __future__ import annotations

from functools import partial

from headway.perf.latency.table import TableLatency, TableSource
from headway.policy.iteration.config import SchedulerConfig
from headway.policy.iteration.medha import MedhaConfig
from headway.sim import InstanceSpec, RunSpec, simulate
from headway.sim.metrics import SloTargets
from headway.sim.workload import TraceRequest
from headway_research.base import ExperimentReport, Mode, RunOptions, source
from headway_research.verdicts import at_most, both, exact, judge

# an iteration of the example; and the time of a row, so that an iteration takes 100 tokens
QUANTUM_S = 0.01
TOKEN_S = 0.0001
ARRIVAL_S = 4.9999
"""They arrive during the iteration that ends at t = 5, whatever the clock's last digit."""
BY_HAND: dict[str, dict[str, float]] = {
    "fcfs": {"L": 10.0, "S1": 10.5, "S2": 11.0},
    "edf": {"L": 11.0, "S1": 5.5, "S2": 6.0},
    "lrs": {"L": 11.0, "S1": 6.0, "S2": 5.99},
    "srpt": {"L": 11.0, "S1": 5.5, "S2": 6.0},
    "lars": {"L": 11.0, "S1": 6.21, "S2": 6.20},
}
STATED = {
    "fcfs": "L runs from 0 to 10; both shorts wait until 10 and miss",
    "edf": "the shorts preempt L at 5",
    "lrs": "not stated",
    "srpt": "not in the paper",
    "lars": "not stated",
}


def latency() -> TableLatency:
    """A row costs a tenth of a millisecond; attention costs nothing."""
    return TableLatency(
        TableSource(
            fingerprint="",
            provenance="the example's own: work is given in seconds",
            tokens=((0, 0.0), (1, TOKEN_S), (10_001, 10_001 * TOKEN_S)),
            chunks=((0, 0.0, 0.0), (10_000, 0.0, 0.0)),
            decode=(0.0, 0.0, 0.0),
        )
    )


def finish_times(policy: str, mode: Mode) -> dict[str, float]:
    """When each request's prefill is done."""
    # paper mode orders only: space sharing comes after the example (§4.2)
    sharing = mode != "paper" and policy == "lars"
    config = SchedulerConfig.named(
        mode,
        policy=policy,
        t_target_s=QUANTUM_S + 1e-9,
        medha=MedhaConfig(space_sharing=sharing, long_iterations=0.0),
    )
    requests = [TraceRequest(0.0, 100_000, 1, klass="long")]
    requests += [TraceRequest(ARRIVAL_S, 5_000, 1, klass="short")] * 2
    targets = {"long": SloTargets(ttft_s=16.0), "short": SloTargets(ttft_s=6.0 - ARRIVAL_S)}
    result = simulate(
        InstanceSpec(config=config, latency=latency(), kv_tokens=200_000), requests, RunSpec(targets=targets)
    )
    return {name: record.token_s[0] for name, record in zip(("L", "S1", "S2"), result.records, strict=True)}


def run(options: RunOptions) -> ExperimentReport:
    """See the module."""
    found = {policy: both(partial(finish_times, policy)) for policy in BY_HAND}
    rows = [
        judge(
            f"{policy.upper()}: finish times in seconds",
            f"{STATED[policy]} (by hand: {', '.join(f'{name} {at:g}' for name, at in by_hand.items())})",
            exact(by_hand, 2 * QUANTUM_S + 1e-6),
            found[policy],
            "Equal shorts may finish in either order." if policy == "lars" else "",
        )
        for policy, by_hand in BY_HAND.items()
    ]
    rows.append(
        judge(
            "LARS meets the deadlines of short and long requests (§4.1): the later short, seconds",
            "both shorts by 6.0",
            at_most(6.0 + 1e-6),
            lambda mode: max(found["lars"][mode]["S1"], found["lars"][mode]["S2"]),
            "Literal LARS lets the shorts wait until their relative slack is the document's (0.6, at 5.2 s) and then "
            "has one second of work left until 6.0 for two of them, in turns.",
        )
    )
    scenario = f"one instance, iterations of {QUANTUM_S:g} s, {TOKEN_S:g} s a token"
    return ExperimentReport(source=source("given by the example: seconds of work", scenario), rows=tuple(rows))
