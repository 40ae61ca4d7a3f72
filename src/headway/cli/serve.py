"""`headway serve [MODEL]`: an OpenAI-compatible server; the embedded model when none is named."""

from __future__ import annotations

import argparse
from pathlib import Path

from headway.cli import hosts, serve_options
from headway.cli.options import add_options, environment, print_config, resolve
from headway.core.errors import ConfigError
from headway.runtime.engine.numerics import settle


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help="folder of a Hugging Face checkpoint (default: the embedded model)")
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings; flags and environment win over it")
    parser.add_argument("--print-config", action="store_true", help="print the settings that result, as YAML, and exit")
    parser.add_argument(
        "--dry-run", action="store_true", help="load, print what fits and the chunks to expect, and exit"
    )
    parser.add_argument(
        "--allow-public", action="store_true", help="listen on an address other than loopback without an API key"
    )
    add_options(parser, serve_options.ALL)


def model_folder(named: str | None) -> str:
    """The checkpoint to serve; raises ConfigError when there is no such folder."""
    if named is None:
        from headway.runtime.embedded import model_path

        return str(model_path())
    if not Path(named).is_dir():
        raise ConfigError(
            f"{named} is not a folder: give the folder of a Hugging Face checkpoint (config.json, *.safetensors)"
        )
    return named


def run(arguments: argparse.Namespace) -> int:
    values, given = resolve(serve_options.ALL, arguments, environment(), arguments.config)
    if arguments.print_config:
        print(print_config(serve_options.effective(values, given)), end="")
        return 0
    model = model_folder(arguments.model)
    settings = serve_options.server_settings(values)
    config = hosts.settle_token(serve_options.engine_config(model, values, given), values["node_rank"])
    if values["node_rank"]:
        return hosts.run_host(config, values["node_rank"], settings)
    if arguments.dry_run:
        settle()
        from headway.cli.dry_run import report

        print(report(config))
        return 0
    from headway.serving.binding import bind, check_binding, release

    check_binding(settings.host, settings.api_key, arguments.allow_public)
    sockets = bind(settings.host, settings.port)

    from headway.runtime.engine.client import ProcessEngineClient

    client: ProcessEngineClient | None = None
    try:
        client = ProcessEngineClient(config)  # the engine loads while this process imports the server
        from headway.serving.app import create_app
        from headway.serving.run import serve
        from headway.serving.tokenizer import ModelTokenizer

        app = create_app(client, ModelTokenizer.load(Path(model)), settings)
        started = serve(app, settings, force_binding=arguments.allow_public, sockets=sockets)
    finally:
        release(sockets)
        if client is not None:
            client.end()
    if client.failure is not None:
        raise ConfigError(client.failure)
    return 0 if started else 1
