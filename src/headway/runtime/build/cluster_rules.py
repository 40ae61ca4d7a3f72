"""The placement policy of a live cluster, made from a cluster file and measured latencies, and its decision log.

Used for serving, for replay of a recorded run (`runtime.build.cluster_replay`), and by benchmarks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec

from headway.core.errors import ConfigError
from headway.core.event_log import open_event_log
from headway.runtime.cluster.cluster_file import ClusterFile, first_of, idle_pools, moves_kv, whole_prompts

if TYPE_CHECKING:
    from headway.perf.hardware.shapes import ModelShape
    from headway.policy.placement.base import PlacementPolicy
    from headway.policy.placement.registry import PolicyContext
    from headway.policy.placement.view import ClusterLinks
    from headway.runtime.cluster.client import ClusterRules
    from headway.runtime.engine.protocol import EngineInfo


def links(file: ClusterFile) -> ClusterLinks:
    """Return the links between a cluster's instances: inside a host, and between hosts."""
    from headway.perf.hardware.links import NetworkLink
    from headway.policy.placement.view import ClusterLinks

    host = NetworkLink(
        name="host", bytes_per_s=2e9, latency_s=1e-4, source="assumed: a socket between processes of one host"
    )
    if len(file.hosts) == 1:
        return ClusterLinks(inside=host, across=host)
    # Gbit/s to bytes/s; never above the rate that is assumed within a host.
    rate = min(host.bytes_per_s, file.network_gbit_s * 1e9 / 8)
    network = NetworkLink(name="network", bytes_per_s=rate, latency_s=2e-4, source="network_gbit_s of the cluster file")
    return ClusterLinks(inside=host, across=network)


def open_log(path: str | None) -> IO[bytes] | None:
    """Open the log of the controller's decisions. Instances write their own logs to FILE.0, FILE.1 and so on."""
    return None if path is None else open_event_log(path)


def sink(log: IO[bytes]) -> Callable[[bytes], None]:
    """Return a writer of lines. After a write error (a full disk) it drops lines: serving continues without the log."""
    failed = False

    def write(line: bytes) -> None:
        nonlocal failed
        # Nothing more is written, even if there is space again: a log with a gap cannot be replayed.
        if failed:
            return
        try:
            log.write(line)
        except OSError as error:
            failed = True
            logging.getLogger("headway.cluster").error("the event log ends here: %s", error)

    return write


def check_moves(file: ClusterFile, infos: Sequence[EngineInfo]) -> None:
    """Raise ConfigError when the policy moves KV and a started instance cannot."""
    if not moves_kv(file) and all(pool.role == "mixed" for pool in file.pools):
        return
    for number, info in enumerate(infos):
        if info.peer_address is None:
            raise ConfigError(
                f"instance {number} computes on {info.device}: KV moves between pools in host memory only, so that "
                "such instances serve whole requests, of role mixed, under jsq, or under fifo, priority or reservation "
                "with `long_sp: 1`"
            )


def live_rules(file: ClusterFile, model: str, infos: Sequence[EngineInfo], log: IO[bytes] | None) -> ClusterRules:
    """Return `rules_of` started instances, after `check_moves`; warn once of unused and unequal pools."""
    check_moves(file, infos)
    for warning in (*idle_pools(file), *_unequal_lengths(file, infos)):
        logging.getLogger("headway.cluster").warning("%s", warning)
    return rules_of(file, model, infos, log)


def _unequal_lengths(file: ClusterFile, infos: Sequence[EngineInfo]) -> list[str]:
    lengths = [infos[first].max_model_len for first in first_of(file)]
    if len(set(lengths)) == 1:
        return []
    each = ", ".join(f"pools[{i}] {length:,}" for i, length in enumerate(lengths))
    return [f"requests of up to {min(lengths):,} tokens are served, output included: the longest are {each}"]


def rules_of(file: ClusterFile, model: str, infos: Sequence[EngineInfo], log: IO[bytes] | None = None) -> ClusterRules:
    """Return the policy and latencies that a cluster decides by.

    Spans are predicted with the latencies of the first instance that prefills. log: of decisions, if any.
    """
    from headway.perf.latency import eq1
    from headway.runtime.cluster.client import ClusterRules
    from headway.runtime.cluster.live_controller import DecisionLog

    measured = {}
    if file.group_times is not None:
        measured = {"group_times": msgspec.to_builtins(eq1.load(Path(file.group_times)).sizes)}

    def context_of(info: EngineInfo) -> PolicyContext:
        return policy_context(file, model, {"latency": info.latency, "layout": info.layout} | measured)

    lead = infos[next(first for pool, first in zip(file.pools, first_of(file), strict=True) if pool.role != "decode")]
    about = {"placement": file.placement, "options": file.options, "latency": lead.latency, "layout": lead.layout}
    about |= measured
    context = context_of(lead)
    return ClusterRules(
        policy=policies_of(file, context),
        latency=context.latency,
        latency_of=lambda info: context.latency if info is None or info.latency is None else context_of(info).latency,
        shape=context.shape,
        rows=file.span_rows,
        log=None if log is None else DecisionLog(sink(log), about),
    )


def policies_of(file: ClusterFile, context: PolicyContext) -> Callable[[], PlacementPolicy]:
    """Return a function that makes the policy; called at the start and whenever instances join or leave."""
    from headway.policy.placement.registry import make_placement

    return lambda: make_placement(file.placement, context, file.options)


def policy_context(file: ClusterFile, model: str, about: Mapping[str, Any]) -> PolicyContext:
    """Return a policy's context: the model's sizes, the links, and latencies.

    about: an instance's `latency` (as `perf.latency.recorded.describe` writes it) and `layout`; `group_times`: the
    coefficients of Eq. (1) by SP size, if groups were measured. Otherwise a ring step costs the longer of what the
    instance computes in it and what its link takes (no constant of another machine); for `pecsched`, which chooses
    between forms of sequence parallelism, a group costs what fast SP's formulas say at the instance's own rates.
    """
    from headway.perf.latency import eq1
    from headway.perf.latency.fast_sp_groups import FastSpLatency, measured_rates
    from headway.perf.latency.groups import GroupLatency
    from headway.perf.latency.layout import ParallelLayout
    from headway.perf.latency.recorded import restore
    from headway.perf.latency.ring import RingLatency
    from headway.policy.placement.registry import PolicyContext

    shape, between = shape_of(model), links(file)
    table, _ = restore(about["latency"])
    tp = ParallelLayout.named(about["layout"]).tp
    spans: GroupLatency = RingLatency(table, shape, between.inside, between.across, tp, step_s=0.0)
    measured = about.get("group_times")
    if measured is not None:
        found = eq1.Eq1Latency(msgspec.convert(measured, dict[int, eq1.Eq1Coefficients], strict=False), "measured")
        spans = eq1.completed(found, spans, sum(pool.count for pool in file.pools if pool.role != "decode"))
    elif file.placement == "pecsched":
        rates = measured_rates(table, shape, between.inside, between.across, tp)
        spans = FastSpLatency(spans, shape, rates, tp)
    whole = file.placement == "ladder" and whole_prompts(file)
    return PolicyContext(
        latency=spans, shape=shape, rows=file.span_rows, pads_heads=False, copies_prefixes=False, whole_prompts=whole
    )


def shape_of(model: str) -> ModelShape:
    """Return the sizes of the checkpoint in folder `model`."""
    from headway.perf.hardware.models import from_config_file

    return from_config_file(Path(model))
