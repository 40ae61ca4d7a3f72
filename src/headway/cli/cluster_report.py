"""`headway cluster --dry-run`: what fits, which groups prompts would get, and the rate that the simulator predicts.

One instance of each pool is loaded and measured, one after another; the rest is computed from that.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from headway.core.request import Request
from headway.latency.base import LatencyModel
from headway.latency.groups import GroupLatency, GroupShape
from headway.latency.sharded_decode import ShardedDecode
from headway.placement.base import Arrived, Commit, Enqueue, Placement, Reject
from headway.placement.registry import Surroundings, make_placement
from headway.placement.view import ClusterBook, ClusterView, Instance, Links
from headway.router.cluster_file import ClusterFile
from headway.simulator.cluster.spec import ClusterSpec
from headway.simulator.cluster.world import simulate_cluster
from headway.simulator.spec import InstanceSpec, RunSpec
from headway.workload import TraceRequest

if TYPE_CHECKING:
    from headway.engine.core import EngineCore

REQUESTS = 200
OUTPUT = 64
LONG_SHARE = 0.1
MET = 0.9
_STEPS = 7


def groups(file: ClusterFile, surroundings: Surroundings, instances: Sequence[Instance], links: Links) -> list[str]:
    """What a prompt of each length would be given by the policy in an idle cluster."""
    longest = min(each.capacity for each in instances)
    lines, tokens = ["prompt tokens   on an idle cluster"], 1024
    lengths = []
    while tokens < longest:
        lengths.append(tokens)
        tokens *= 4
    for length in [*(lengths or [longest // 2]), longest - OUTPUT - 1]:
        placement = make_placement(file.placement, surroundings, file.options)
        lines.append(f"{length:>13,}   {_placed(placement, length, instances, links)}")
    return lines


def _placed(placement: Placement, tokens: int, instances: Sequence[Instance], links: Links) -> str:
    request = Request(id="r", arrival_s=0.0, prompt_tokens=tokens, max_output_tokens=OUTPUT)
    actions = placement.on_event(Arrived(request), ClusterView(ClusterBook(instances, links), 0.0))
    for action in actions:
        if isinstance(action, Commit):
            spans = (f"{span.start:,} to {span.end:,} on {_names(span.group)}" for span in action.spans)
            return "tokens " + ", ".join(spans)
        if isinstance(action, Enqueue):
            return f"whole, in the batches of {_names(action.group)}"
        if isinstance(action, Reject):
            return f"refused: {action.why}"
    return "waits for more to decide by"


def _names(group: Sequence[int]) -> str:
    return "instance " + "+".join(map(str, group)) if len(group) == 1 else "instances " + "+".join(map(str, group))


def capacity(
    file: ClusterFile,
    surroundings: Surroundings,
    instances: Sequence[Instance],
    links: Links,
    cores: Sequence[EngineCore],
) -> list[str]:
    """The highest rate at which the simulator meets a first-token target for most requests, and what was assumed.
    cores: of each instance, its pool's."""
    longest = min(each.capacity for each in instances)
    lengths = max(16, longest // 64), max(32, longest // 4)
    latency = surroundings.latency
    alone = [latency.prefill_s(0, tokens, GroupShape(1)) for tokens in lengths]
    work_s = alone[0] * (1 - LONG_SHARE) + alone[1] * LONG_SHARE
    able = sum(each.role != "decode" for each in instances)
    spec = _spec(surroundings, instances, links, cores)
    low, high, best = 0.0, 2.0 * able / work_s, 0.0
    for _ in range(_STEPS):
        rate = (low + high) / 2
        if _met(file, surroundings, spec, rate, lengths) >= MET:
            low = best = rate
        else:
            high = rate
    targets = " and ".join(f"{_target_s(latency, tokens):.2g} s for {tokens:,} tokens" for tokens in lengths)
    return [
        f"predicted capacity   {best:.2g} requests/s" if best else f"predicted capacity   below {high:.2g} requests/s",
        f"  assumed            Poisson arrivals, prompts of {lengths[0]:,} tokens, every tenth {lengths[1]:,};",
        f"                     {OUTPUT} tokens of output",
        f"  met where          {MET:.0%} of requests have their first token in time: {targets}",
        f"                     (5 times what the prompt takes alone, at least 1 s); {REQUESTS} requests simulated",
        f"  times from         one instance measured alone on its threads, groups derived from that: {latency.source}",
    ]


def _target_s(latency: GroupLatency, tokens: int) -> float:
    return max(1.0, 5 * latency.prefill_s(0, tokens, GroupShape(1)))


def _met(
    file: ClusterFile, surroundings: Surroundings, spec: ClusterSpec, rate_rps: float, lengths: tuple[int, int]
) -> float:
    """Share of requests with a first token in time."""
    rng, at, requests = random.Random(0), 0.0, []
    for number in range(REQUESTS):
        at += rng.expovariate(rate_rps)
        requests.append(TraceRequest(at, lengths[number % 10 == 9], OUTPUT))
    placement = make_placement(file.placement, surroundings, file.options)
    result = simulate_cluster(spec, placement, requests, RunSpec())
    met = 0
    for record in result.sim.records:
        if record.token_s and record.error is None:
            met += record.token_s[0] - record.arrival_s <= _target_s(surroundings.latency, record.prompt_tokens)
    return met / REQUESTS


def _spec(
    surroundings: Surroundings, instances: Sequence[Instance], links: Links, cores: Sequence[EngineCore]
) -> ClusterSpec:
    def engine(group: Sequence[Instance]) -> InstanceSpec:
        head = cores[group[0].id]
        latency: LatencyModel = head.scheduler.latency
        config = head.scheduler.config
        if len(group) > 1:
            link = links.inside if len({each.node for each in group}) == 1 else links.across
            latency = ShardedDecode(latency, len(group), surroundings.shape.layers, link, 1)
            config = replace(config, stages=1)
        return InstanceSpec(
            config=config,
            latency=latency,
            kv_tokens=sum(each.capacity for each in group),
            block_tokens=head.info.kv_block_tokens,
        )

    return ClusterSpec(
        instances=tuple(instances),
        engine=engine,
        spans=surroundings.latency,
        shape=surroundings.shape,
        links=links,
    )
