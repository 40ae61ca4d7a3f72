"""`--dry-run` of `headway serve` and `headway cluster`: memory, chunks, groups and predicted times, without serving."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import msgspec

from headway.core.batch import ManualClock
from headway.core.request import Request
from headway.perf.latency.base import MAX_CHUNK, BatchLoad, PrefillCache, solve_tokens
from headway.perf.latency.fitted import prefill_band
from headway.perf.latency.groups import GroupShape, ShardedModel
from headway.policy.iteration.budget import reference_aim_s
from headway.policy.iteration.groups import GroupedScheduler
from headway.policy.placement.contract import (
    ClusterSnapshot,
    ClusterState,
    CommitSpans,
    EnqueueRequest,
    RejectRequest,
    RequestArrived,
)
from headway.runtime.assembly.cluster import ClusterPlan, InstanceMeasurement, cluster_plan, measurement
from headway.runtime.assembly.engine import assemble
from headway.runtime.assembly.facts import summary
from headway.runtime.cluster.cluster_file import ClusterFile, first_of
from headway.runtime.engine.config import EngineConfig, InstanceConfig
from headway.runtime.engine.core import EngineCore
from headway.sim.cluster.build import engine_of
from headway.sim.cluster.simulation import simulate_cluster
from headway.sim.report.tables import duration
from headway.sim.spec import InstanceSpec, RunSpec
from headway.sim.workload import TraceRequest


def report(config: EngineConfig) -> str:
    """Load the model, measure it briefly, and return a description of the engine. Raises ConfigError like `serve`."""
    return "\n".join(described(loaded(config)))


def loaded(config: EngineConfig) -> EngineCore:
    """Return an assembled engine whose executor is closed: measured, without an event log, unable to compute."""
    core = assemble(msgspec.structs.replace(config, event_log=None), ManualClock())
    core.executor.close()
    return core


def loaded_instance(config: EngineConfig) -> EngineCore:
    """The same for an instance of a cluster, whose pool need not hold the longest request."""
    return loaded(msgspec.structs.replace(config, instance=InstanceConfig(number=0, listen="")))


def described(core: EngineCore, prefills: bool = True) -> list[str]:
    """Return lines on what fits, and on chunks and times to expect. prefills: False for a decode instance."""
    info, scheduler = core.info, core.scheduler
    budget = reference_aim_s(scheduler.config, scheduler.latency)
    latency, groups = scheduler.latency, None
    if isinstance(scheduler, GroupedScheduler):
        shard = scheduler.shard_tokens
        # A prompt longer than a shard is spread over KV groups: predict with the exchange between them.
        latency = ShardedModel(latency, shard)
        share = f"{len(scheduler.groups)}, each with {scheduler.block_managers[0].total_tokens:,} of these tokens"
        groups = f"{share}; of one request a group holds {shard:,}, then another joins"
    lines = summary(info, groups)
    if not prefills:
        return lines
    lines += ["", "context so far   next chunk   prompt of this length, alone (error bar: P90)"]
    times = PrefillCache(latency, budget, max(scheduler.config.min_chunk, 16))
    past = 0
    while past < info.max_model_len:
        chunk, _ = solve_tokens(latency, BatchLoad(), past, MAX_CHUNK, budget)
        # The scheduler takes at least `min_chunk`, even over budget.
        chunk = min(max(chunk, scheduler.config.min_chunk), info.max_model_len - past)
        alone = times.total_s(past)
        band = prefill_band(latency, past) if past else None
        lines.append(f"{past:>14,}   {chunk:>10,}   {alone:>10.2f} s{f' {band.words()}' if band else ''}")
        # Context lengths 0, 1K, 4K, 16K, ...
        past = max(1024, past * 4)
    return lines


# `headway cluster --dry-run`: memory of each pool's instances, groups that prompts would get, predicted capacity.
#
# All of it is computed from one measured instance of each pool.

REQUESTS = 200, 1500
"""Smallest and largest number of simulated requests at one rate."""
OUTPUT = 64
"""Output tokens of each simulated request."""
LONG_EVERY = 10
"""One prompt in as many is long."""
MET = 0.9
"""Share of first tokens that must be in time for a rate to be within capacity."""
_STEPS = 5
"""Bisections of the rate: the interval shrinks to 1/32."""
_ITERATIONS = 64
"""Simulated iterations of a long prompt alone, about; below that an iteration is no longer than a live one."""
_SHARE = 0.2
"""Longest simulated iteration, of the time in which a short prompt's first token is due."""
_GAIN = 0.25
"""Most of a long prompt's time that longer iterations may save it: the rate is lowered by what they save."""


def cluster_report(file: ClusterFile, model: str, configs: Sequence[EngineConfig]) -> Iterator[str]:
    """Load one instance of each pool, one after another, and describe the cluster, each part as soon as it is known.

    model: the checkpoint's folder; configs: of each instance, in the order of the pools. All are loaded on this host.
    """
    several_hosts = len(file.hosts | {0}) > 1
    yield f"placement            {file.placement}, {len(configs)} instances"
    measured: list[InstanceMeasurement] = []
    for i, (pool, first) in enumerate(zip(file.pools, first_of(file), strict=True)):
        place = f", on host {pool.host}" if several_hosts else ""
        lines = ["", f"pool {i}: {pool.count} x {pool.role}{place}, {configs[first].threads} threads each"]
        if pool.host:
            lines += [f"  loaded on this host: what fits on host {pool.host} may differ"]
        core = loaded_instance(configs[first])
        lines += described(core, prefills=pool.role != "decode")
        yield "\n".join(lines)
        measured += [measurement(core, configs[first])] * pool.count
    idle = file.combination.idle_pools()
    if idle:
        yield "\n".join(["", *idle])
    plan = cluster_plan(file, model, configs, measured)
    yield "\n".join(["", *groups(plan), ""])
    yield "\n".join(capacity(plan))


def groups(plan: ClusterPlan) -> list[str]:
    """Tabulate which instances the policy gives to a prompt of each length in an idle cluster."""
    most = plan.cluster.longest - OUTPUT - 1
    # 1K, 4K, 16K, ... tokens, and the longest that leaves room for the output.
    lengths = [1024 << 2 * k for k in range(12) if 1024 << 2 * k < most] or [most // 2]
    lines = ["prompt tokens   in an idle cluster"]
    return lines + [f"{length:>13,}   {_placed(plan, length)}" for length in [*lengths, most]]


def _placed(plan: ClusterPlan, tokens: int) -> str:
    request = Request(id="r", arrival_s=0.0, prompt_tokens=tokens, max_output_tokens=OUTPUT)
    view = ClusterSnapshot(ClusterState(plan.cluster.instances, plan.cluster.links), 0.0)
    for action in plan.rules.policy().on_event(RequestArrived(request), view):
        if isinstance(action, CommitSpans):
            return ", then ".join(
                f"tokens {span.start:,} to {span.end:,} on {_names(span.group)}" for span in action.spans
            )
        if isinstance(action, EnqueueRequest):
            return f"in the batches of {_names(action.group)}"
        if isinstance(action, RejectRequest):
            return f"refused: {action.why}"
    return "waits for more to decide by"


def _names(group: Sequence[int]) -> str:
    return f"instance{'s' if len(group) > 1 else ''} " + "+".join(map(str, group))


def prompt_lengths(longest: int) -> tuple[int, int]:
    """Return the tokens of short and of long prompts where requests of up to `longest` tokens are served."""
    return max(16, longest // 64), max(32, longest // 4)


def capacity(plan: ClusterPlan) -> list[str]:
    """Bisect the highest rate at which the share `MET` of first tokens is in time; return it with the assumptions.

    Exact to about 15%: the last interval is 1/16 of the rate at which instances are fully busy, and iterations are
    simulated longer than they are (`with_longer_iterations`). One instance of the embedded model with 131,072 tokens
    of context: 4.48 requests a second, with live iterations and seven bisections 4.59; with 1M 0.0342, 0.0383."""
    lengths = prompt_lengths(plan.cluster.longest)
    simulated, left = with_longer_iterations(plan, lengths)
    work_s = sum(_alone_s(plan, _length(number, lengths)) for number in range(LONG_EVERY)) / LONG_EVERY
    # Upper end: twice the rate at which prefilling instances would be fully busy, each alone.
    low, high = 0.0, 2.0 * sum(each.role != "decode" for each in plan.cluster.instances) / work_s
    for _ in range(_STEPS):
        rate = (low + high) / 2
        # Assumes that the share in time falls as the rate grows.
        if _met(simulated, rate, lengths) >= MET:
            low = rate
        else:
            high = rate
    low, high = low * left, high * left
    targets = " and ".join(duration(_target_s(plan, tokens)) for tokens in lengths)
    inside, across = plan.cluster.links.inside.bytes_per_s / 1e9, plan.cluster.links.across.bytes_per_s / 1e9
    hosts = "" if across == inside else f", between hosts at {across:g} (network_gbit_s)"
    found = f"{_three_digits(low)} requests/s" if low else f"below {_three_digits(high)} requests/s"
    return [
        f"predicted capacity   {found}, simulated ({REQUESTS[0]} to {REQUESTS[1]} requests a try), exact to about 15%",
        f"  asked              prompts of {lengths[0]:,} tokens, every tenth {lengths[1]:,}, output {OUTPUT}, Poisson",
        f"  in time            {MET:.0%} of first tokens, within 5 times what prompts take alone, and 1 s: {targets}",
        *_error_bars(plan, lengths),
        "  assumed            that instances compute side by side as fast as the one that was measured alone; groups",
        f"                     {plan.rules.latency.source};",
        f"                     KV moves at {inside:g} GB/s{hosts}",
    ]


def _error_bars(plan: ClusterPlan, lengths: tuple[int, int]) -> list[str]:
    """Return a line of the error bars of prompts alone, as the first instance that prefills predicts them; none where
    no table of times lies under its model."""
    each = zip(plan.cluster.instances, plan.cluster.engines, strict=True)
    latency = next(engine.latency for instance, engine in each if instance.role != "decode")
    bands = [(tokens, prefill_band(latency, tokens)) for tokens in lengths]
    words = [f"{tokens:,} tokens {band.words()}" for tokens, band in bands if band is not None]
    return [f"  error bars (P90)   of times alone, and so about of the rate: {'; '.join(words)}"] if words else []


def _three_digits(rate: float) -> str:
    """Return a rate such as 0.0153 or 7,810: never with an exponent's e."""
    return f"{float(f'{rate:.3g}'):,.10g}"


def _alone_s(plan: ClusterPlan, tokens: int) -> float:
    return plan.rules.latency.prefill_s(0, tokens, GroupShape(1))


def _target_s(plan: ClusterPlan, tokens: int) -> float:
    return max(1.0, 5 * _alone_s(plan, tokens))


def _length(number: int, lengths: tuple[int, int]) -> int:
    # The comparison is the index: 1 (long) for the last of each `LONG_EVERY`, else 0.
    return lengths[number % LONG_EVERY == LONG_EVERY - 1]


def with_longer_iterations(plan: ClusterPlan, lengths: tuple[int, int]) -> tuple[ClusterPlan, float]:
    """Return the plan with engines whose iterations are long enough for a simulation of seconds, and the share of a
    long prompt's time that is left where they save it most.

    An engine whose iteration times are set keeps them."""
    short, long = lengths
    longest_s = min(_SHARE * _target_s(plan, short), _alone_s(plan, long) / _ITERATIONS)
    cluster, engines, left = plan.cluster, list[InstanceSpec](), 1.0
    for engine in cluster.engines:
        config, latency = engine.config, engine.latency
        aim_s, least = reference_aim_s(config, latency), max(config.min_chunk, 16)
        usual_s, step_s = PrefillCache(latency, aim_s, least).total_s(long), longest_s
        while step_s > aim_s and PrefillCache(latency, step_s, least).total_s(long) < (1 - _GAIN) * usual_s:
            step_s /= 2
        if step_s > aim_s and config.t_target_s is None:
            config = replace(config, t_target_s=step_s)
            left = min(left, PrefillCache(latency, step_s, least).total_s(long) / usual_s)
        # No two prompts begin alike: a prefix cache would only be filled and emptied.
        engines.append(replace(engine, config=config, prefix_cache=None))
    made = partial(engine_of, engines, cluster.links, cluster.shape.layers, False)
    return plan._replace(cluster=replace(cluster, engine=made)), left


def _met(plan: ClusterPlan, rate_rps: float, lengths: tuple[int, int]) -> float:
    """Simulate one rate; return the share of requests whose first token is in time.

    The number of requests covers 20 times the laxest target, within the bounds of `REQUESTS`.
    """
    least, most = REQUESTS
    count = min(most, max(least, int(20 * _target_s(plan, lengths[1]) * rate_rps)))
    # The same seed at every rate: inter-arrival times are those of other rates, scaled.
    rng, at, requests = random.Random(0), 0.0, []
    for number in range(count):
        at += rng.expovariate(rate_rps)
        requests.append(TraceRequest(at, _length(number, lengths), OUTPUT))
    # By then every first token has come in time or has not.
    window_s = at + _target_s(plan, lengths[1])
    result = simulate_cluster(plan.cluster, plan.rules.policy(), requests, RunSpec(window_s=window_s))
    met = 0
    for record in result.sim.records:
        if record.token_s and record.error in (None, "unfinished"):
            met += record.token_s[0] - record.arrival_s <= _target_s(plan, record.prompt_tokens)
    return met / count
