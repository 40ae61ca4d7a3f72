"""`headway serve [MODEL]`: an OpenAI-compatible server; the embedded model when none is named."""

from __future__ import annotations

import argparse
from pathlib import Path

from headway.cli.options import add_options, environment, given_flags
from headway.core.errors import ConfigError
from headway.core.settings import print_config, resolve
from headway.runtime.build import hosts
from headway.runtime.engine.numerics import settle
from headway.serving.serve_settings import ServeSettings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `headway serve`."""
    parser.add_argument("model", nargs="?", help="folder of a Hugging Face checkpoint (default: the embedded model)")
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings; flags and environment win over it")
    parser.add_argument("--print-config", action="store_true", help="print the settings that result, as YAML, and exit")
    parser.add_argument(
        "--dry-run", action="store_true", help="load, print what fits and the chunks to expect, and exit"
    )
    parser.add_argument(
        "--allow-public", action="store_true", help="listen on an address other than loopback without an API key"
    )
    add_options(parser, ServeSettings)


def model_folder(named: str | None) -> str:
    """Return the folder of the checkpoint to serve; raises ConfigError when there is no such folder."""
    if named is None:
        from headway.runtime.embedded import model_path

        return str(model_path())
    if not Path(named).is_dir():
        raise ConfigError(
            f"{named} is not a folder: give the folder of a Hugging Face checkpoint (config.json, *.safetensors)"
        )
    return named


def settings_of(arguments: argparse.Namespace) -> ServeSettings:
    """Resolve the settings from flags, environment and `--config`, in this order of precedence. Raises ConfigError."""
    file = {}
    if arguments.config:
        from headway.core.strict_yaml import read_yaml

        file = read_yaml(arguments.config)
    flags = given_flags(ServeSettings, arguments)
    return resolve(ServeSettings, flags=flags, environment=environment(), file=file, origin=str(arguments.config))


def run(arguments: argparse.Namespace) -> int:
    """Serve, or run `--print-config` or `--dry-run`; return the exit status."""
    settings = settings_of(arguments)
    if arguments.print_config:
        print(print_config(settings.effective()), end="")
        return 0
    model = model_folder(arguments.model)
    config = hosts.settle_token(settings.engine_config(model), settings.node_rank)
    # Only node 0 has the endpoint; the other hosts run workers until node 0 ends.
    if settings.node_rank:
        return hosts.run_host(config, settings.node_rank)
    if arguments.dry_run:
        settle()
        from headway.runtime.build.dry_run import report

        print(report(config))
        return 0
    from headway.serving.launch import serve_model

    return serve_model(config, settings.server_settings(), allow_public=arguments.allow_public)
