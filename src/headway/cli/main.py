"""Entry point of the `headway` command. A subcommand's modules are imported only when it is chosen."""

from __future__ import annotations

import argparse
import codecs
import gc
import inspect
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from headway import __version__
from headway.cli.command_parser import CommandParser, hanging
from headway.core.errors import ConfigError, HeadwayError, needs_serve
from headway.core.machine import require_linux

COMMANDS: dict[str, tuple[str, str]] = {
    "serve": ("headway.cli.serve", "serve a model to OpenAI clients"),
    "cluster": ("headway.cli.serve:cluster", "serve a model from several engines, with a placement policy before them"),
    "prepare": ("headway.cli.prepare", "have a server compute a document's KV ahead, and keep it for questions"),
    "bench": (
        "headway.serving.load.load",
        "replay a trace on an OpenAI endpoint and measure it; `bench convoy` compares policies",
    ),
    "demo": ("headway.cli.demo", "a long document and chats on one server, in numbers and a picture"),
    "simulate": ("headway.cli.simulate", "how a policy and a layout behave on a workload, in virtual time"),
    "compare": ("headway.cli.simulate:compare", "all policies, or all placements, on one workload: a row each"),
    "plan": ("headway.cli.plan", "the cheapest layout, number of accelerators and policy that meet latency demands"),
    "reproduce": ("headway_research.reproduce", "reproduce the papers' figures: their numbers beside ours"),
    "accel": (
        "headway_research.accelerator.command",
        "simulate on-chip KV prefetching on an accelerator",
    ),
    "trace": ("headway.cli.logs:trace", "a server's event log as a trace for ui.perfetto.dev, one lane a stage"),
    "examples": ("headway.cli.main:examples", "the example files that come with the package: listed, or copied"),
    "doctor": ("headway.cli.doctor", "what this machine can do: processor, memory, kernels, devices, packages, ports"),
    "watch": ("headway.cli.logs:watch", "the live page of an event log, played in a browser on this machine"),
    "why": ("headway.cli.logs:why", "why a request's first token or worst gap came so late, from an event log"),
    "profile": ("headway.cli.profile", "measure how long a model takes on this machine, for better chunks"),
    "completion": ("headway.cli.main:completion", "a script by which a shell completes commands, flags and files"),
}


class CommandImplementation(NamedTuple):
    """What a command is made of."""

    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[..., int]
    about: str
    """Its documentation: that of its function where a module has several commands, else the module's."""


def implementation(where: str) -> CommandImplementation:
    """Import what implements a command: `MODULE`, or `MODULE:NAME` for its `add_NAME_arguments` and `run_NAME`."""
    module_name, _, name = where.partition(":")
    module = import_module(module_name)
    if not name:
        return CommandImplementation(module.add_arguments, module.run, inspect.cleandoc(module.__doc__ or ""))
    run = getattr(module, f"run_{name}")
    return CommandImplementation(getattr(module, f"add_{name}_arguments"), run, inspect.cleandoc(run.__doc__ or ""))


ADVICE = {"serve": "; for flags of vLLM run `vllm serve MODEL --scheduler-cls headway.vllm.Scheduler`"}
"""What to do about unknown flags, by command."""

HELP_PAGES = frozenset(("serve", "cluster"))
"""Commands whose `--help` is an overview."""

LINUX_ONLY = frozenset(("serve", "cluster", "demo", "profile"))
"""Commands whose engine needs Linux (eventfd, memfd, pidfd)."""

NESTED: dict[tuple[str, str], str] = {
    ("profile", "check"): "headway.cli.logs:check",
    ("profile", "fit"): "headway_research.fit.command",
    ("profile", "fit-eq1"): "headway_research.fit.eq1_command",
    ("profile", "rates"): "headway_research.tetris.profile_rates",
    ("profile", "--vllm"): "headway.cli.vllm:profile",
    ("doctor", "--vllm"): "headway.cli.vllm:doctor",
}
"""Two-word commands with a parser of their own, by their words."""

PASSES_FLAGS = frozenset((("profile", "--vllm"), ("doctor", "--vllm")))
"""Those that take flags of another program."""


STUDIES = "headway_research"
"""The package of the papers' reproductions and studies. Only its commands need it; they are found by name."""


_LONGEST = 900
"""Characters of an error that are shown."""


def main(argv: list[str] | None = None) -> int:
    """Run one command and return the exit status. Errors that a user can correct are one line, not a traceback."""
    words = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    codecs.register_error("headway-plain", _plain)
    for stream in (sys.stdout, sys.stderr):
        # Streams that are not text files of the interpreter's own, as under a test, are left.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="headway-plain")
    with _terminated_like_ctrl_c(words):
        return _guarded(lambda: _run(words))


@contextmanager
def _terminated_like_ctrl_c(words: list[str]) -> Iterator[None]:
    """Handle SIGTERM like Ctrl-C, so that every `finally` runs and started processes are ended. Servers, which finish
    requests first, handle it themselves."""
    if words[0] in ("serve", "cluster") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


_PLAIN = {
    "–": "-", "…": "~", "±": "+-", "·": "|", "×": "x", "✓": "+", "✗": "x", "µ": "u", "—": "-", "→": "->", "−": "-",
    "§": "S", "█": "#", "░": "=", "≤": "<=", "≥": ">=", "≈": "~", "’": "'",
}  # fmt: skip


def _plain(error: UnicodeError) -> tuple[str, int]:
    """Return what a terminal without these characters shows instead of them. An error handler of `codecs`."""
    assert isinstance(error, UnicodeEncodeError)
    return "".join(_PLAIN.get(letter, "?") for letter in error.object[error.start : error.end]), error.end


def _run(words: list[str]) -> int:
    # Before the main parser: `headway profile` takes a model folder where these have their second word.
    if tuple(words[:2]) in NESTED:
        return _nested(words)
    chosen = next((word for word in words if not word.startswith("-")), None)
    parser = CommandParser(prog="headway", description="Long-context LLM serving.")
    parser.add_argument("--version", action="version", version=f"headway {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    if chosen is not None and chosen not in COMMANDS:
        close = get_close_matches(chosen, COMMANDS, 1)
        parser.error(f"there is no command {chosen!r}" + "".join(f"; did you mean {name}?" for name in close))
    if chosen in LINUX_ONLY and not {"-h", "--help"} & set(words):
        require_linux(f"`headway {chosen}`")
    if chosen == words[0] and _starts_engines(words):
        from headway.runtime.launcher.standby import start_early

        start_early()  # what takes longest, beside this command's own imports
        gc.disable()  # until there is a server: collections beside imports take a tenth of them
    run: Callable[..., int] | None = None
    requested = parser
    # Only the chosen command's module is imported: the others would bring torch and seconds of imports.
    for name, (where, text) in COMMANDS.items():
        about = text[0].upper() + text[1:] + "."
        sub = commands.add_parser(name, help=text, description=about, help_pages=name in HELP_PAGES)
        if name == chosen:
            command = implementation(where)
            command.add_arguments(sub)
            run, requested = command.run, sub
    arguments, unknown = parser.parse_known_args(words)
    if unknown:
        requested.refuse(unknown, ADVICE.get(str(chosen), ""))
    assert run is not None
    return run(arguments)


def _starts_engines(words: list[str]) -> bool:
    """Whether the words start engines with a standby process, as far as can be told before they are read."""
    others = ("-h", "--help", "--print", "--dry", "--replay", "--standby", "--no-standby", "--device", "--nnodes")
    plain = not any(word.startswith(others) or "-parallel-size" in word for word in words)
    if words[0] not in ("serve", "cluster") or not plain or "HEADWAY_STANDBY" in os.environ:
        return False
    from headway.perf.device import has_driver

    return not has_driver()


def _nested(words: list[str]) -> int:
    command = implementation(NESTED[words[0], words[1]])
    parser = CommandParser(prog=f"headway {words[0]} {words[1]}", description=command.about)
    command.add_arguments(parser)
    arguments, unknown = parser.parse_known_args(words[2:])
    if (words[0], words[1]) in PASSES_FLAGS:
        return command.run(arguments, unknown)
    if unknown:
        parser.refuse(unknown)
    return command.run(arguments)


def _say(words: str) -> int:
    # A value that is quoted may be a megabyte.
    words = words if len(words) <= _LONGEST else f"{words[: _LONGEST // 2]} … {words[-_LONGEST // 3 :]}"
    print(f"headway: error: {words}", file=sys.stderr)
    return 2


def _guarded(run: Callable[[], int]) -> int:
    try:
        with needs_serve("this command"):
            status = run()
        # Here and not at the interpreter's end, which would print a traceback of its own for a closed pipe.
        sys.stdout.flush()
        return status
    except HeadwayError as error:
        return _say(str(error))
    except OverflowError as error:
        return _say(f"a number in the settings or files is too large: {error}")
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] == STUDIES:
            print(f"headway: error: this command is in {STUDIES}: install Headway's whole wheel", file=sys.stderr)
            return 2
        raise
    except BrokenPipeError:
        # `headway … | head`: the reader has seen enough. Nothing may be written at the interpreter's end either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        # 128 + SIGPIPE, as shells report it.
        return 141
    except OSError as error:
        # A file that is not named is a fault here.
        if error.filename is None:
            raise
        return _say(f"{error.filename}: {error.strerror}")
    except KeyboardInterrupt:
        # 128 + SIGINT, as shells report it.
        return 130
    finally:
        gc.enable()
        # Not imported: nothing was started.
        if (templates := sys.modules.get("headway.runtime.launcher.standby")) is not None:
            templates.discard_early()


# `headway completion SHELL`: a script that completes commands, flags and files in a shell (shtab).

SHELLS = ("bash", "zsh", "fish", "tcsh")


def add_completion_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "shell", choices=SHELLS, help="for which; bash: source <(headway completion bash), zsh: into a folder of $fpath"
    )


def run_completion(arguments: argparse.Namespace) -> int:
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
    from headway.core.errors import SERVE_ONLY

    parser = CommandParser(prog="headway")
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = parser.add_subparsers(dest="command")
    for name, (where, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text)
        try:
            implementation(where).add_arguments(command)
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


# `headway examples`: the example files that come with the package, listed, or copied to where they can be changed.


def add_examples_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--copy",
        type=Path,
        nargs="?",
        const=Path("examples"),
        metavar="DIR",
        help="copy them there (default: ./examples, as the documentation names them); files that exist are left",
    )


def run_examples(arguments: argparse.Namespace) -> int:
    import shutil

    folder = examples_folder()
    files = sorted(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    if arguments.copy is None:
        width = max(len(str(path.relative_to(folder))) for path in files)
        for path in files:
            print(hanging(f"{path.relative_to(folder)!s:{width}}  ", described(path)))
        print(f"\nin {folder}\n`headway examples --copy` copies them to ./examples")
        return 0
    copied = 0
    for path in files:
        target = arguments.copy / path.relative_to(folder)
        if target.exists():
            continue
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
        except OSError as error:
            raise ConfigError(f"cannot write {target}: {error.strerror}") from error
        copied += 1
    print(f"{copied} files copied to {arguments.copy}, {len(files) - copied} were there")
    return 0


def examples_folder() -> Path:
    """Return the folder of the examples: in an installed package, or in the checkout that this runs from."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "examples", package.parents[1] / "examples"):
        if folder.is_dir():
            return folder
    raise ConfigError("this installation has no examples: they are in wheels and in the repository")


def described(path: Path) -> str:
    """Return what a file says of itself: the first sentence of its opening comment or docstring, or its name field."""
    import re

    text = path.read_text()
    if path.suffix == ".json":
        return "a dashboard for Grafana"
    if path.suffix == ".csv":
        return "sessions of agents whose turns repeat what came before: replay them on a server by headway bench"
    if path.suffix == ".ipynb":
        import json

        return str(json.loads(text)["cells"][0]["source"][0]).strip("# \n") + " (a notebook)"
    comment = re.match(r'(?:#[^\n]*\n)+|"""[^"]*"""', text)
    words = re.sub(r'^#[ ]?|"""', "", comment[0], flags=re.MULTILINE) if comment else ""
    # The first line of some is the command that they are for.
    words = " ".join(line for line in words.splitlines() if not line.startswith("headway "))
    return re.split(r"(?<=[.?]) |: (?=`)|: +$", words.strip())[0]


if __name__ == "__main__":
    sys.exit(main())
