"""`headway serve [MODEL]`: an OpenAI-compatible server; the embedded model when none is named."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable

from pydantic import Field

from headway.cli.command_parser import fitting
from headway.core.errors import ConfigError
from headway.core.settings import Text, add_options, environment, given_flags, print_config, resolve, unknown_variables
from headway.runtime.engine.config import settle
from headway.serving.launch import is_hub_id, model_folder
from headway.serving.serve_settings import ServeSettings, group_of, too_many_threads


class StartSettings(ServeSettings):
    """What an operator may set about `headway serve`."""

    model: Text | None = Field(
        None, description="the same as MODEL, for the environment and the file", json_schema_extra={"metavar": "MODEL"}
    )
    revision: Text | None = Field(None, description="branch, tag or commit of a hub id in the local cache")
    download_dir: Text | None = Field(
        None, description="the local hub cache; default: that of HF_HUB_CACHE or HF_HOME. Nothing is downloaded"
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
        "--dry-run", action="store_true", help="load, print what fits and the chunks to expect, and exit"
    )
    parser.add_argument(
        "--allow-public", action="store_true", help="listen on an address other than loopback without an API key"
    )
    add_options(parser, StartSettings, group_of=group_of)


def settings_of(arguments: argparse.Namespace) -> StartSettings:
    """Resolve the settings from flags, environment and `--config`, in this order of precedence. Raises ConfigError."""
    file = {}
    if arguments.config:
        from headway.core.strict_yaml import read_yaml

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
        from headway.serving.launch import load_tokenizer

        load_tokenizer(model, settings.server_settings())
        print(fitting(report(config)))
        return 0
    from headway.serving.launch import serve_model

    return serve_model(config, settings.server_settings(), allow_public=arguments.allow_public)
