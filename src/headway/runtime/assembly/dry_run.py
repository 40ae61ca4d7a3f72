"""`--dry-run` of `headway serve` and `headway cluster`: memory, chunks, groups and predicted times, without serving."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from headway.core.batch import ManualClock
from headway.core.request import Request
from headway.perf.latency.base import MAX_CHUNK, BatchLoad, PrefillCache, solve_tokens
from headway.perf.latency.fitted import prefill_band
from headway.perf.latency.groups import ShardedModel
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


# `headway cluster --dry-run`: memory of each pool's instances, and groups that prompts would get.
#
# All of it is computed from one measured instance of each pool.

OUTPUT = 64
"""Output tokens of a request that is asked about."""


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
    yield "\n".join(["", *groups(plan), "", "what rate to expect: `headway simulate FILE`"])


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
