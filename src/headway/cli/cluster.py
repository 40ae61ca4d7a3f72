"""`headway cluster cluster.yaml`: several engines behind one OpenAI endpoint, and a placement policy between."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from headway.cli import serve_options
from headway.cli.options import add_options, combine, environment, read_yaml
from headway.cli.serve import model_folder
from headway.core.errors import ConfigError
from headway.engine.config import EngineConfig
from headway.engine.numerics import settle
from headway.router.cluster_file import ClusterFile, cluster_file, model_of, placement_options

if TYPE_CHECKING:
    from headway.engine.protocol import EngineInfo
    from headway.latency.groups import GroupLatency
    from headway.placement.base import Placement
    from headway.placement.view import Links


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help="a YAML file such as examples/cluster.yaml; docs/live-cluster.md")
    parser.add_argument(
        "--dry-run", action="store_true", help="load one instance of each pool, print what fits, and exit"
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
        print(_report(file, configs))
        return 0
    from headway.server.binding import check_binding

    check_binding(settings.host, settings.api_key, arguments.allow_public)

    from headway.engine.client import ProcessEngineClient
    from headway.placement.view import Instance
    from headway.router.client import ClusterClient, Member

    engines = [ProcessEngineClient(config) for config in configs]
    try:
        from headway.server.app import create_app
        from headway.server.run import serve
        from headway.server.tokenizer import Tokenizer

        roles = [pool.role for pool in file.pools for _ in range(pool.count)]
        members = [
            Member(
                client=engine,
                instance=Instance(
                    id=i, node=0, role=role, tp=config.tensor_parallel_size, stages=config.pipeline_parallel_size
                ),
            )
            for i, (engine, config, role) in enumerate(zip(engines, configs, roles, strict=True))
        ]
        client = ClusterClient(members, _links(), lambda infos: _policy(file, model, infos))
        app = create_app(client, Tokenizer.load(Path(model)), settings)
        started = serve(app, settings, force_binding=arguments.allow_public)
    finally:
        for engine in engines:
            engine.end()
    if client.failure is not None:
        raise ConfigError(client.failure)
    return 0 if started else 1


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
        threads = made.threads or max(1, len(os.sched_getaffinity(0)) // (count * workers))
        for _ in range(pool.count):
            log = made.event_log and f"{made.event_log}.{len(configs)}"
            configs.append(msgspec.structs.replace(made, threads=threads, memory_share=1.0 / count, event_log=log))
    return configs


def _links() -> Links:
    from headway.hardware.links import Link
    from headway.placement.view import Links

    host = Link(name="host", bytes_per_s=2e9, latency_s=1e-4, source="assumed: a socket between processes of one host")
    return Links(inside=host, across=host)


def _policy(file: ClusterFile, model: str, infos: Sequence[EngineInfo]) -> tuple[Placement, GroupLatency]:
    """The policy, told what the first engine has measured."""
    from headway.hardware.models import from_hf_config
    from headway.latency.recorded import restore
    from headway.latency.ring import RingLatency
    from headway.placement.registry import Surroundings, make_placement

    shape = from_hf_config(json.loads((Path(model) / "config.json").read_text()))
    table, _ = restore(infos[0].latency)
    links = _links()
    latency = RingLatency(table, shape, links.inside, links.across)
    surroundings = Surroundings(latency=latency, shape=shape)
    return make_placement(file.placement, surroundings, placement_options(file)), latency


def _report(file: ClusterFile, configs: list[EngineConfig]) -> str:
    from headway.cli.dry_run import report

    lines, first = [f"placement            {file.placement}, {len(configs)} instances"], 0
    for i, pool in enumerate(file.pools):
        lines += ["", f"pool {i}: {pool.count} x {pool.role}, {configs[first].threads} threads each"]
        lines.append(report(configs[first]))
        first += pool.count
    return "\n".join(lines)
