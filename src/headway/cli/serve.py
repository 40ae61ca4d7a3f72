"""`headway serve [MODEL]`: an OpenAI-compatible server; the embedded model when none is named. `headway cluster`:
several engines behind one endpoint.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

from pydantic import Field

from headway.cli.command_parser import fitting
from headway.core.errors import ConfigError
from headway.core.settings import (
    Text,
    add_options,
    environment,
    flag_of,
    given_flags,
    print_config,
    resolve,
    unknown_variables,
)
from headway.core.strict_yaml import read_yaml
from headway.runtime.cluster.cluster_file import ClusterFile, check_hosts, cluster_file, model_of
from headway.runtime.engine.config import RAY_ADDRESS_NEEDED, settle
from headway.serving.launch import (
    is_hub_id,
    load_tokenizer,
    model_folder,
    serve_cluster,
    serve_http_cluster,
    serve_model,
)
from headway.serving.serve_settings import ServeSettings, group_of, instance_configs, shared_cores, too_many_threads
from headway.serving.settings import EndpointSettings


class StartSettings(ServeSettings):
    """What an operator may set about `headway serve`."""

    model: Text | None = Field(
        None, description="MODEL as a setting, for HEADWAY_MODEL and --config", json_schema_extra={"metavar": "MODEL"}
    )
    revision: Text | None = Field(None, description="branch, tag or commit of a hub id in the local cache")
    download_dir: Text | None = Field(
        None,
        description="folder of the local hub cache; default: that of HF_HUB_CACHE or HF_HOME. Nothing is downloaded",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `headway serve`."""
    parser.add_argument(
        "model_tag",
        metavar="MODEL",
        nargs="?",
        help="folder of a Hugging Face checkpoint, or a hub id in the local hub cache (default: the embedded model)",
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings; flags and environment win over it")
    parser.add_argument("--print-config", action="store_true", help="print the settings that result, as YAML, and exit")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="load the model, print the tokens that the KV cache holds and the chunks to expect, and exit",
    )
    parser.add_argument(
        "--allow-public", action="store_true", help="listen on an address other than loopback without an API key"
    )
    add_options(parser, StartSettings, group_of=group_of)


def settings_of(arguments: argparse.Namespace) -> StartSettings:
    """Resolve the settings from flags, environment and `--config`, in this order of precedence. Raises ConfigError."""
    file = {}
    if arguments.config:
        file = read_yaml(arguments.config, commands=("serve",))
    flags = given_flags(StartSettings, arguments)
    if arguments.model_tag is not None:
        if flags.setdefault("model", arguments.model_tag) != arguments.model_tag:
            raise ConfigError(f"two models are named: {arguments.model_tag} and --model {flags['model']}")
    elif "model" not in flags and "," in flags.get("served_model_name", ""):
        # The last of several names may have been meant as the model.
        names = flags["served_model_name"].replace(",", " ")
        raise ConfigError(f"--served-model-name takes all the words after it ({names}): put MODEL before it")
    return resolve(StartSettings, flags=flags, environment=environment(), file=file, origin=str(arguments.config))


def warn(sentences: Iterable[str]) -> None:
    """Print warnings before there is a log."""
    for sentence in sentences:
        print(f"headway: warning: {sentence}", file=sys.stderr)


def run(arguments: argparse.Namespace) -> int:
    """Serve, or run `--print-config` or `--dry-run`; return the exit status."""
    settings = settings_of(arguments)
    warn(unknown_variables(StartSettings, environment()))
    if arguments.print_config:
        print(print_config(settings.effective()), end="")
        return 0
    model = model_folder(settings.model, settings.revision, settings.download_dir)
    if is_hub_id(settings.model) and not settings.served_model_name:
        # The cache's folder is named after a commit.
        settings = settings.model_copy(update={"served_model_name": (settings.model,)})
    config = settings.engine_config(model)
    warn(too_many_threads(config))
    if arguments.dry_run:
        settle()
        from headway.runtime.assembly.dry_run import report

        load_tokenizer(model, settings.server_settings())
        print(fitting(report(config)))
        return 0
    return serve_model(config, settings.server_settings(), allow_public=arguments.allow_public)


def add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `headway cluster`: those of `headway serve` set what all instances share."""
    parser.add_argument("file", type=Path, help="a YAML file such as examples/cluster.yaml; docs/how-to/cluster.md")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--dry-run",
        action="store_true",
        help="load one instance of each pool, print how many tokens its KV cache holds and its times, and exit",
    )
    instead.add_argument(
        "--replay",
        metavar="LOG",
        type=Path,
        help="take the decisions in a LOG of --event-log again, and say whether they are the same",
    )
    parser.add_argument(
        "--allow-public", action="store_true", help="listen on an address other than loopback without an API key"
    )
    add_options(parser, ServeSettings, group_of=group_of)


def run_cluster(arguments: argparse.Namespace) -> int:
    """`headway cluster cluster.yaml`: serve several engines behind one OpenAI endpoint, with a placement policy.

    Or run `--dry-run` or `--replay`. Returns the exit status."""
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
        _dry_run_cluster(file, where, model, settings)
        return 0
    if arguments.replay is not None:
        from headway.runtime.assembly.cluster import replay_log

        outcome, same = replay_log(file, model, arguments.replay)
        print(outcome)
        return 0 if same else 1
    if file.hosts != {0} and settings.ray_address is None:
        raise ConfigError(RAY_ADDRESS_NEEDED)
    instance_configs(file, where, model, settings)  # only for its errors: cores of other hosts are not known yet
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
    model, key = model_folder(model_of(file, arguments.file.parent)), variables.get("HEADWAY_INSTANCE_API_KEY")
    return serve_http_cluster(file, model, settings.server_settings(), api_key=key, allow_public=arguments.allow_public)


def _dry_run_cluster(file: ClusterFile, where: str, model: str, settings: ServeSettings) -> None:
    settle()
    configs = instance_configs(file, where, model, settings)
    from headway.runtime.assembly.dry_run import cluster_report

    for warning in shared_cores(file, configs):
        print(fitting(f"warning: {warning}"), end="\n\n")
    for part in cluster_report(file, model, configs):
        print(fitting(part), flush=True)
