"""What a live cluster decides by, and the log of that: a policy made from a cluster file and measured latencies.

Used to serve, to decide a recorded run again (`--replay`), and by benchmarks.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec

from headway.cli.cluster_seats import first_of
from headway.core.errors import ConfigError
from headway.runtime.build.event_log import open_event_log
from headway.runtime.cluster.cluster_file import ClusterFile, idle_pools, moves_kv

if TYPE_CHECKING:
    from headway.perf.hardware.shapes import ModelShape
    from headway.policy.placement.base import PlacementPolicy
    from headway.policy.placement.registry import PolicyContext
    from headway.policy.placement.view import ClusterLinks
    from headway.runtime.cluster.client import ClusterRules
    from headway.runtime.engine.protocol import EngineInfo


def links(file: ClusterFile) -> ClusterLinks:
    """Between its instances: those of one host, and those of two."""
    from headway.perf.hardware.links import NetworkLink
    from headway.policy.placement.view import ClusterLinks

    host = NetworkLink(
        name="host", bytes_per_s=2e9, latency_s=1e-4, source="assumed: a socket between processes of one host"
    )
    if len(file.hosts) == 1:
        return ClusterLinks(inside=host, across=host)
    rate = min(host.bytes_per_s, file.network_gbit_s * 1e9 / 8)
    network = NetworkLink(name="network", bytes_per_s=rate, latency_s=2e-4, source="network_gbit_s of the cluster file")
    return ClusterLinks(inside=host, across=network)


def open_log(path: str | None) -> IO[bytes] | None:
    """Where the router's decisions are written; those of instances go to FILE.0, FILE.1 and so on."""
    return None if path is None else open_event_log(path)


def sink(log: IO[bytes]) -> Callable[[bytes], None]:
    """Writes lines. A log that cannot be written any more (a full disk, say) ends there: the cluster goes on."""
    failed = False

    def write(line: bytes) -> None:
        nonlocal failed
        if failed:
            return
        try:
            log.write(line)
        except OSError as error:
            failed = True
            logging.getLogger("headway.cluster").error("the event log ends here: %s", error)

    return write


def check_moves(file: ClusterFile, infos: Sequence[EngineInfo]) -> None:
    """Raises ConfigError where KV is to move and an instance that has started cannot do that."""
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
    """`rules_of`, of instances that have started. What is odd about them is logged, once."""
    check_moves(file, infos)
    for words in (*idle_pools(file), *_unequal(file, infos)):
        logging.getLogger("headway.cluster").warning("%s", words)
    return rules_of(file, model, infos, log)


def _unequal(file: ClusterFile, infos: Sequence[EngineInfo]) -> list[str]:
    lengths = [infos[first].max_model_len for first in first_of(file)]
    if len(set(lengths)) == 1:
        return []
    each = ", ".join(f"pools[{i}] {length:,}" for i, length in enumerate(lengths))
    return [f"requests of up to {min(lengths):,} tokens are served, output included: the longest are {each}"]


def rules_of(file: ClusterFile, model: str, infos: Sequence[EngineInfo], log: IO[bytes] | None = None) -> ClusterRules:
    """The policy, told what the first instance that prefills has measured."""
    from headway.runtime.cluster.client import ClusterRules
    from headway.runtime.cluster.live_controller import DecisionLog

    def context(info: EngineInfo) -> PolicyContext:
        return context_of(file, model, {"latency": info.latency, "layout": info.layout})

    lead = infos[next(first for pool, first in zip(file.pools, first_of(file), strict=True) if pool.role != "decode")]
    about = {"placement": file.placement, "options": file.options, "latency": lead.latency, "layout": lead.layout}
    told = context(lead)
    return ClusterRules(
        policy=policies_of(file, told),
        latency=told.latency,
        latency_of=lambda info: told.latency if info is None or info.latency is None else context(info).latency,
        shape=told.shape,
        rows=file.span_rows,
        log=None if log is None else DecisionLog(sink(log), about),
    )


def policies_of(file: ClusterFile, context: PolicyContext) -> Callable[[], PlacementPolicy]:
    """Makes the policy, as often as instances come or go."""
    from headway.policy.placement.registry import make_placement

    return lambda: make_placement(file.placement, context, file.options)


def context_of(file: ClusterFile, model: str, about: Mapping[str, Any]) -> PolicyContext:
    """What policies are told of the model, of one instance's latencies and layout, and of what connects instances."""
    from headway.perf.latency.layout import ParallelLayout
    from headway.perf.latency.recorded import restore
    from headway.perf.latency.ring import RingLatency
    from headway.policy.placement.registry import PolicyContext

    shape, between = shape_of(model), links(file)
    table, _ = restore(about["latency"])
    spans = RingLatency(table, shape, between.inside, between.across, ParallelLayout.named(about["layout"]).tp)
    return PolicyContext(latency=spans, shape=shape, rows=file.span_rows)


def replay_log(file: ClusterFile, model: str, path: Path) -> int:
    """Drive the machine and the policy from a log; 1 where they decide otherwise than they did."""
    from headway.control.replay import ReplayResult
    from headway.runtime.cluster.policies import PlacementChain, may_of

    made: list[PlacementChain] = []

    def make(replay: ReplayResult) -> PlacementChain:
        about = replay.about or {}
        if (about.get("placement"), about.get("options")) != (file.placement, file.options):
            raise ConfigError(f"it is of placement {about.get('placement')!r} with options {about.get('options')}")
        made.append(PlacementChain(policies_of(file, context_of(file, model, about)), may_of(replay.machine)))
        return made[0]

    def noted(word: str) -> None:
        if word == "renew":
            made[0].renew()
        elif word == "taken":
            made[0].stranded.clear()

    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise ConfigError(f"replay: {error}") from error
    try:
        replay = ReplayResult(lines, make, noted)
        difference = replay.run()
    except ConfigError as error:
        raise ConfigError(f"replay: {path}: {error}") from error
    except (KeyError, TypeError, msgspec.ValidationError) as error:
        raise ConfigError(f"replay: {path}: its first line is not that of a cluster's log: {error}") from None
    print(f"{replay.decisions} decisions, all as recorded" if difference is None else str(difference))
    return 0 if difference is None else 1


def shape_of(model: str) -> ModelShape:
    """The sizes of a checkpoint."""
    from headway.perf.hardware.models import from_hf_config

    return from_hf_config(json.loads((Path(model) / "config.json").read_text()))
