"""`headway completion SHELL`: a script that completes commands, flags and files in a shell (shtab)."""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path

from headway.cli.command_parser import CommandParser
from headway.core.errors import ConfigError

SHELLS = ("bash", "zsh", "fish", "tcsh")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "shell", choices=SHELLS, help="for which; bash: source <(headway completion bash), zsh: into a folder of $fpath"
    )


def run(arguments: argparse.Namespace) -> int:
    print(script(arguments.shell))
    return 0


def script(shell: str) -> str:
    """Return the script. Commands whose packages are not installed complete by name only. Raises ConfigError."""
    try:
        import shtab
    except ModuleNotFoundError:
        raise ConfigError("completion needs shtab, which was left out: pip install shtab") from None
    parser = whole_parser()
    for command in _commands(parser):
        for action in command._actions:
            if action.type is Path:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    return str(shtab.complete(parser, shell))


def whole_parser() -> argparse.ArgumentParser:
    """Return the parser with every command's flags, which imports the modules of all commands."""
    from headway.cli.main import COMMANDS
    from headway.core.extras import SERVE_ONLY

    parser = CommandParser(prog="headway")
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = parser.add_subparsers(dest="command")
    for name, (module_name, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text)
        try:
            import_module(module_name).add_arguments(command)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in SERVE_ONLY:
                raise
    return parser


def _commands(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    found = [parser]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found += [each for command in action.choices.values() for each in _commands(command)]
    return found
