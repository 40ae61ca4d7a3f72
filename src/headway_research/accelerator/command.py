"""`headway accel …`: what on-chip memory and an idle HBM channel are worth (docs/papers/accelerator.md)."""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path

from headway.core.errors import ConfigError

WORDS: dict[str, tuple[str, str]] = {
    "stage": (
        "headway_research.accelerator.stage_command:stage",
        "one iteration: serial, packed, packed with prefetch; what bounds it",
    ),
    "sweep": (
        "headway_research.accelerator.stage_command:sweep",
        "stages over any fields, as CSV, with the Pareto front",
    ),
    "serve": ("headway_research.accelerator.serve_command:serve", "requests at one rate, by the real scheduler"),
    "capacity": (
        "headway_research.accelerator.serve_command:capacity",
        "the highest rate within the limits, with and without prefetch",
    ),
    "validate": (
        "headway_research.accelerator.validate_command:validate",
        "the paper's figures beside ours; fails when one moves",
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="word", metavar="WHAT", required=True)
    for word, (_, about) in WORDS.items():
        sub = commands.add_parser(word, help=about, description=about[0].upper() + about[1:] + ".")
        if word != "validate":
            sub.add_argument("file", nargs="?", type=Path, help="a YAML file (examples/accel/); none: defaults")
            sub.add_argument(
                "--set", action="append", default=[], metavar="FIELD=VALUE", help="such as machine.prefetch_buffer=1G"
            )
        sub.add_argument("--json", type=Path, metavar="FILE", help="write everything as JSON ('-': stdout, no tables)")
        if word in ("stage", "sweep", "capacity"):
            sub.add_argument("--plot", type=Path, metavar="FILE", help="draw it: .png, .svg, or both without a suffix")
        if word != "validate":
            sub.add_argument("--csv", type=Path, metavar="FILE", help="write rows ('-': stdout, no tables)")
        if word == "sweep":
            sub.add_argument(
                "--axis", action="append", default=[], metavar="FIELD=…",
                help="values of a field: START:STOP:STEP or VALUE,VALUE,…; given twice: all combinations",
            )  # fmt: skip
        if word == "serve":
            sub.add_argument("--qps", type=float, metavar="N", help="requests a second, instead of serve.workload.qps")
        if word == "capacity":
            sub.add_argument(
                "--match", action="store_true", help="also: the HBM bandwidth that packing alone would need"
            )
            sub.add_argument("--ratio", type=float, default=1.02, metavar="N", help="precision of a search (1.02)")
        if word == "validate":
            sub.add_argument("--zigzag", action="store_true", help="also: products beside zigzag-dse (extra `zigzag`)")
            sub.add_argument("--schema", action="store_true", help="print the JSON Schema of accel files and end")


def run(arguments: argparse.Namespace) -> int:
    module, _, function = WORDS[arguments.word][0].partition(":")
    answer: int = getattr(import_module(module), function)(arguments)
    return answer


def read_data(arguments: argparse.Namespace) -> tuple[dict[str, object], str, Path]:
    """Read a study's file and apply `--set`.

    Returns the plain data, the file's name in errors, and the folder to which paths in it are relative.
    """
    from headway.core.strict_yaml import read_yaml
    from headway.sim.sweep import parse_sweep, with_field

    data: dict[str, object] = read_yaml(str(arguments.file)) if arguments.file is not None else {}
    for text in arguments.set:
        field, values = parse_sweep(text, "--set")
        if len(values) != 1:
            raise ConfigError(f"--set {text!r}: one value; use `headway accel sweep --axis` for several")
        section = field.split(".")[0]
        # A preset by name becomes a section, so that one of its fields can be set.
        if section in ("machine", "assumptions") and isinstance(data.get(section), str):
            data[section] = {"preset": data[section]}
        data = with_field(data, field, values[0])
    folder = arguments.file.parent if arguments.file is not None else Path()
    return data, str(arguments.file or "accel"), folder
