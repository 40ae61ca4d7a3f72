"""`headway examples`: the example files that come with the package, listed, or copied to where they can be changed."""

from __future__ import annotations

import argparse
import re
import shutil
from pathlib import Path

from headway.cli.command_parser import hanging
from headway.core.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--copy",
        type=Path,
        nargs="?",
        const=Path("examples"),
        metavar="DIR",
        help="copy them there (default: ./examples, as the documentation names them); files that exist are left",
    )


def run(arguments: argparse.Namespace) -> int:
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
    text = path.read_text()
    if path.suffix == ".json":
        return "a dashboard for Grafana"
    if path.suffix == ".ipynb":
        import json

        return str(json.loads(text)["cells"][0]["source"][0]).strip("# \n") + " (a notebook)"
    comment = re.match(r'(?:#[^\n]*\n)+|"""[^"]*"""', text)
    words = re.sub(r'^#[ ]?|"""', "", comment[0], flags=re.MULTILINE) if comment else ""
    # The first line of some is the command that they are for.
    words = " ".join(line for line in words.splitlines() if not line.startswith("headway "))
    return re.split(r"(?<=[.?]) |: (?=`)|: +$", words.strip())[0]
