"""`headway cluster cluster.yaml`: several engines behind one OpenAI endpoint, and a placement policy between."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import msgspec

from headway.cli import serve_options
from headway.cli.cluster_rules import links, open_log, replay_log, rules_of
from headway.cli.options import add_options, combine, environment, read_yaml
from headway.cli.serve import model_folder
from headway.core.errors import ConfigError, RequestError
from headway.engine.config import EngineConfig
from headway.engine.numerics import settle
from headway.router.cluster_file import ClusterFile, cluster_file, model_of, moves_kv, nodes_of
from headway.router.instance import seen


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help="a YAML file such as examples/cluster.yaml; docs/live-cluster.md")
    parser.add_argument(
        "--dry-run", action="store_true", help="load one instance of each pool, print what fits, and exit"
    )
    parser.add_argument(
        "--replay", metavar="LOG", type=Path, help="decide again what --event-log LOG tells, say whether it is the same"
    )
    parser.add_argument(
        "--allow-public", action="store_true", help="listen on an address other than loopback without an API key"
    )
    add_options(parser, serve_options.ALL)


def run(arguments: argparse.Namespace) -> int:
    where = str(arguments.file)
    data = read_yaml(where)
    file = cluster_file(data, where)
    values, given = combine(serve_options.ALL, arguments, environment(), file.serve, f"{where}: serve")
    model = model_folder(model_of(file, arguments.file.parent))
    configs = instance_configs(file, where, model, values, given)
    settings = serve_options.server_settings(values)
    if arguments.dry_run:
        settle()
        print(_report(file, model, configs))
        return 0
    if arguments.replay is not None:
        return replay_log(file, model, arguments.replay)
    from headway.server.binding import check_binding

    check_binding(settings.host, settings.api_key, arguments.allow_public)

    from headway.core.scratch import ScratchFolder
    from headway.router.client import ClusterClient
    from headway.router.instance import LiveInstance
    from headway.router.launch import launcher

    log = open_log(values["event_log"])
    folder = ScratchFolder("headway-cluster-")
    first = first_of(file)

    def another(number: int, pool: int, incarnation: int) -> LiveInstance:
        if not 0 <= pool < len(file.pools):
            raise RequestError(f"pool must be between 0 and {len(file.pools) - 1}, not {pool}", "pool")
        node = nodes_of(file)[first[pool]]
        launch = launcher(number, folder.path)
        config = joining(configs[first[pool]], first[pool], number, incarnation)
        return LiveInstance(number, file.pools[pool].role, node, pool, config, launch, incarnation)

    instances: list[LiveInstance] = []
    try:
        for number, (node, config) in enumerate(zip(nodes_of(file), configs, strict=True)):
            pool = max(i for i, start in enumerate(first) if start <= number)
            launch = launcher(number, folder.path)
            instances.append(LiveInstance(number, file.pools[pool].role, node, pool, config, launch))
        from headway.server.app import create_app
        from headway.server.run import serve
        from headway.server.tokenizer import Tokenizer

        client = ClusterClient(
            instances,
            links(),
            lambda infos: rules_of(file, model, infos, log),
            placement=file.placement,
            another=another,
            backends=file.backends,
            in_place=file.group_decode == "in-place",
        )
        app = create_app(client, Tokenizer.load(Path(model)), settings)
        started = serve(app, settings, force_binding=arguments.allow_public)
        instances = list(client.fleet)
    finally:
        for each in instances:
            each.end()
        folder.close()
    if client.failure is not None:
        raise ConfigError(client.failure)
    return 0 if started else 1


def first_of(file: ClusterFile) -> list[int]:
    """The number of each pool's first instance."""
    counts = [pool.count for pool in file.pools]
    return [sum(counts[:i]) for i in range(len(counts))]


def instance_configs(
    file: ClusterFile, where: str, model: str, values: dict[str, Any], given: set[str]
) -> list[EngineConfig]:
    """One engine's settings for each instance. Cores and memory that nobody has shared out are shared equally."""
    count = sum(pool.count for pool in file.pools)
    configs: list[EngineConfig] = []
    for i, pool in enumerate(file.pools):
        own, named = combine(serve_options.ALL, argparse.Namespace(), {}, pool.serve, f"{where}: pools[{i}].serve")
        mine = {**values, **{name: own[name] for name in named}}
        if mine["nnodes"] > 1:
            raise ConfigError(f"{where}: the instances of a cluster run on this host: nnodes must be 1")
        made = serve_options.engine_config(model, mine, given | named)
        workers = made.tensor_parallel_size * made.pipeline_parallel_size * made.kv_parallel_size
        if workers > 1 and (moves_kv(file) or pool.role != "mixed"):
            raise ConfigError(
                f"{where}: pools[{i}] is of instances of several processes (tensor-, pipeline- or kv-parallel-size "
                "above 1): these serve whole requests, of role mixed, under jsq, or under fifo, priority or "
                "reservation with `long_sp: 1`"
            )
        threads = made.threads or max(1, len(os.sched_getaffinity(0)) // (count * workers))
        for _ in range(pool.count):
            log = made.event_log and f"{made.event_log}.{len(configs)}"
            configs.append(msgspec.structs.replace(made, threads=threads, memory_share=1.0 / count, event_log=log))
    return configs


def joining(config: EngineConfig, like: int, number: int, incarnation: int) -> EngineConfig:
    """The settings of instance `like` for one that joins: its log is its own, and those before it keep theirs."""
    if config.event_log is None:
        return config
    log = f"{config.event_log.removesuffix(f'.{like}')}.{number}" + (f".{incarnation}" if incarnation else "")
    return msgspec.structs.replace(config, event_log=log)


def _report(file: ClusterFile, model: str, configs: list[EngineConfig]) -> str:
    """Loads one instance of each pool, one after another."""
    from headway.cli import cluster_report
    from headway.cli.dry_run import described, loaded
    from headway.latency.recorded import describe

    lines, cores = [f"placement            {file.placement}, {len(configs)} instances"], []
    for i, (pool, first) in enumerate(zip(file.pools, first_of(file), strict=True)):
        lines += ["", f"pool {i}: {pool.count} x {pool.role}, {configs[first].threads} threads each"]
        core = loaded(configs[first])
        lines += described(core)
        cores += [core] * pool.count
    infos = [msgspec.structs.replace(core.info, latency=describe(core.scheduler.latency)) for core in cores]
    rules = rules_of(file, model, infos)
    roles = [pool.role for pool in file.pools for _ in range(pool.count)]
    seats = zip(nodes_of(file), roles, configs, infos, strict=True)
    instances = [
        seen(i, node, role, config, info.kv_tokens_total) for i, (node, role, config, info) in enumerate(seats)
    ]
    plan = cluster_report.Plan(rules, instances, links(), cores, file.backends)
    return "\n".join([*lines, "", *cluster_report.groups(plan), "", *cluster_report.capacity(plan)])
