"""`headway cluster cluster.yaml`: several engines behind one OpenAI endpoint, with a placement policy."""

from __future__ import annotations

import argparse
from pathlib import Path

from headway.cli.command_parser import fitting
from headway.cli.serve import StartSettings, warn
from headway.core.errors import ConfigError
from headway.core.settings import add_options, environment, flag_of, given_flags, resolve, unknown_variables
from headway.core.strict_yaml import read_yaml
from headway.runtime.cluster.cluster_file import ClusterFile, check_hosts, cluster_file, model_of
from headway.runtime.engine.config import RAY_ADDRESS_NEEDED, settle
from headway.serving.launch import model_folder
from headway.serving.serve_settings import ServeSettings, group_of, instance_configs, shared_cores
from headway.serving.settings import EndpointSettings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `headway cluster`: those of `headway serve` set what all instances share."""
    parser.add_argument("file", type=Path, help="a YAML file such as examples/cluster.yaml; docs/how-to/cluster.md")
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
    add_options(parser, ServeSettings, group_of=group_of)


def run(arguments: argparse.Namespace) -> int:
    """Serve, or run `--dry-run` or `--replay`; return the exit status."""
    where = str(arguments.file)
    file = cluster_file(read_yaml(where, "pools: [{count: 2}]", commands=("cluster",)), where)
    if file.behind_http:
        return _serve_http(file, where, arguments)
    # Precedence: flags, environment, then the file's `serve` section.
    flags = given_flags(ServeSettings, arguments)
    settings = resolve(ServeSettings, flags=flags, environment=environment(), file=file.serve, origin=f"{where}: serve")
    warn(unknown_variables(StartSettings, environment()))
    model = model_folder(model_of(file, arguments.file.parent))
    check_hosts(file, where, settings.nnodes)
    if arguments.dry_run:
        _dry_run(file, where, model, settings)
        return 0
    if arguments.replay is not None:
        from headway.runtime.assembly.cluster import replay_log

        outcome, same = replay_log(file, model, arguments.replay)
        print(outcome)
        return 0 if same else 1
    if file.hosts != {0} and settings.ray_address is None:
        raise ConfigError(RAY_ADDRESS_NEEDED)
    instance_configs(file, where, model, settings)  # only for its errors: cores of other hosts are not known yet
    from headway.serving.launch import serve_cluster

    return serve_cluster(file, where, model, settings, allow_public=arguments.allow_public)


def _serve_http(file: ClusterFile, where: str, arguments: argparse.Namespace) -> int:
    """Serve servers behind HTTP, whose engines have settings of their own. Raises ConfigError."""
    if arguments.dry_run or arguments.replay is not None:
        raise ConfigError("--dry-run and --replay are of instances of backend native")
    variables, flags = environment(), given_flags(ServeSettings, arguments)
    settings = resolve(ServeSettings, flags=flags, environment=variables, file=file.serve, origin=f"{where}: serve")
    foreign = sorted(settings.model_fields_set - EndpointSettings.model_fields.keys())
    if foreign:
        raise ConfigError(
            f"{where}: {flag_of(foreign[0])} is of an engine; those of backend vllm have their own settings: say "
            "it in the pool's `command`, or where its servers are started"
        )
    from headway.serving.launch import serve_http_cluster

    model, key = model_folder(model_of(file, arguments.file.parent)), variables.get("HEADWAY_INSTANCE_API_KEY")
    return serve_http_cluster(file, model, settings.server_settings(), api_key=key, allow_public=arguments.allow_public)


def _dry_run(file: ClusterFile, where: str, model: str, settings: ServeSettings) -> None:
    settle()
    configs = instance_configs(file, where, model, settings)
    from headway.runtime.assembly.dry_run import cluster_report

    for warning in shared_cores(file, configs):
        print(fitting(f"warning: {warning}"), end="\n\n")
    for part in cluster_report(file, model, configs):
        print(fitting(part), flush=True)
