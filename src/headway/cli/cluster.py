"""`headway cluster cluster.yaml`: several engines behind one OpenAI endpoint, and a placement policy between."""

from __future__ import annotations

import argparse
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING, Any

import msgspec

from headway.cli import hosts, serve_options
from headway.cli.cluster_rules import links, live_rules, open_log, replay_log, rules_of
from headway.cli.cluster_seats import InstanceFactory, first_of, instance_configs
from headway.cli.options import add_options, combine, environment, read_yaml
from headway.cli.serve import model_folder
from headway.core.errors import ConfigError
from headway.runtime.cluster.cluster_file import ClusterFile, check_hosts, cluster_file, idle_pools, model_of, nodes_of
from headway.runtime.cluster.live_instance import LiveInstance, seen
from headway.runtime.engine.config import EngineConfig
from headway.runtime.engine.numerics import settle

if TYPE_CHECKING:
    from headway.serving.settings import ServerSettings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help="a YAML file such as examples/cluster.yaml; docs/live-cluster.md")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--dry-run", action="store_true", help="load one instance of each pool, print what fits, and exit"
    )
    instead.add_argument(
        "--replay", metavar="LOG", type=Path, help="decide again what --event-log LOG tells, say whether it is the same"
    )
    parser.add_argument(
        "--allow-public", action="store_true", help="listen on an address other than loopback without an API key"
    )
    add_options(parser, serve_options.ALL)


def run(arguments: argparse.Namespace) -> int:
    where = str(arguments.file)
    file = cluster_file(read_yaml(where, "pools: [{count: 2}]"), where)
    values, given = combine(serve_options.ALL, arguments, environment(), file.serve, f"{where}: serve")
    named, node = model_of(file, arguments.file.parent), values["node_rank"]
    if node and not arguments.dry_run:
        config = hosts.settle_token(serve_options.engine_config(named or "", values, given), node, instances=True)
        check_hosts(file, where, config.nnodes)
        return hosts.run_cluster_host(config, node, serve_options.server_settings(values), named)
    model = model_folder(named)
    if arguments.dry_run:
        settle()
        if values["nnodes"] != 1:
            hosts.check_node(values["nnodes"], node)
            check_hosts(file, where, values["nnodes"])
        elif node not in file.hosts | {0}:
            raise ConfigError(f"{where}: node-rank is {node}, but no pool says `host: {node}`: nothing would run there")
        print(_report(file, model, instance_configs(file, where, model, values, given), node))
        return 0
    if arguments.replay is not None:
        return replay_log(file, model, arguments.replay)
    settings = serve_options.server_settings(values)
    check_hosts(file, where, values["nnodes"])
    instance_configs(file, where, model, values, given)
    config = hosts.settle_token(serve_options.engine_config(model, values, given), node, instances=True)
    from headway.serving.binding import bind, check_binding, release

    check_binding(settings.host, settings.api_key, arguments.allow_public)
    sockets = bind(settings.host, settings.port)
    try:
        return _serve(arguments, file, where, model, values, given, config, settings, sockets)
    finally:
        release(sockets)


def _serve(
    arguments: argparse.Namespace,
    file: ClusterFile,
    where: str,
    model: str,
    values: dict[str, Any],
    given: set[str],
    config: EngineConfig,
    settings: ServerSettings,
    sockets: list[socket],
) -> int:
    """From bound sockets to the end."""
    from headway.core.scratch_folder import ScratchFolder
    from headway.runtime.cluster.client import ClusterClient

    log = open_log(values["event_log"])
    host_of: dict[int, int] = {}
    instances: list[LiveInstance] = []
    folder = ScratchFolder("headway-cluster-")
    meeting = hosts.meet(config, host_of.__getitem__) if config.nnodes > 1 else None
    try:
        cores = [] if meeting is None else [host.cores for host in meeting.gather()]
        configs = instance_configs(file, where, model, values, given, cores)
        seats = InstanceFactory(file, configs, folder.path, host_of, meeting, config.rdzv_token or "")
        instances = seats.all()
        from headway.serving.app import create_app
        from headway.serving.run import serve
        from headway.serving.tokenizer import ModelTokenizer

        client = ClusterClient(
            instances,
            links(file),
            lambda infos: live_rules(file, model, infos, log),
            placement=file.placement,
            another=seats.another,
            backends=file.backends,
            in_place=file.group_decode == "in-place",
        )
        app = create_app(client, ModelTokenizer.load(Path(model)), settings)
        started = serve(app, settings, force_binding=arguments.allow_public, sockets=sockets)
        instances = list(client.fleet)
    finally:
        for each in instances:
            each.end()
        if meeting is not None:
            meeting.close()
        folder.close()
    if client.failure is not None:
        raise ConfigError(client.failure)
    return 0 if started else 1


def _report(file: ClusterFile, model: str, configs: list[EngineConfig], node: int) -> str:
    """Loads one instance of each pool, one after another; on a host beside node 0, of each that is to run there."""
    from headway.cli import cluster_report
    from headway.cli.dry_run import described, loaded
    from headway.perf.latency.recorded import describe

    several = len(file.hosts | {0}) > 1
    lines, cores = [f"placement            {file.placement}, {len(configs)} instances"], []
    for i, (pool, first) in enumerate(zip(file.pools, first_of(file), strict=True)):
        place = f", on host {pool.host}" if several else ""
        lines += ["", f"pool {i}: {pool.count} x {pool.role}{place}, {configs[first].threads} threads each"]
        if node and pool.host != node:
            continue
        if pool.host != node:
            lines += [
                f"  loaded on this host; `--dry-run --node-rank {pool.host}` on host {pool.host} says what fits there"
            ]
        core = loaded(configs[first])
        lines += described(core, prefills=pool.role != "decode")
        cores += [core] * pool.count
    idle = idle_pools(file)
    lines += ["", *idle] if idle else []
    if node:
        return "\n".join(lines)
    infos = [msgspec.structs.replace(core.info, latency=describe(core.scheduler.latency)) for core in cores]
    rules = rules_of(file, model, infos)
    roles = [pool.role for pool in file.pools for _ in range(pool.count)]
    seats = zip(nodes_of(file), roles, configs, infos, strict=True)
    instances = [
        seen(i, node, role, config, info.kv_tokens_total) for i, (node, role, config, info) in enumerate(seats)
    ]
    plan = cluster_report.ClusterPlan(rules, instances, links(file), cores, file.backends)
    return "\n".join([*lines, "", *cluster_report.groups(plan), "", *cluster_report.capacity(plan)])
