"""Write the list of vLLM's `serve` flags: `.venv-vllm/bin/python scripts/make_vllm_flags.py` (`--check` only compares).

The list holds facts of the installed vLLM: its version, and of each option string how many values it takes (`0`, `1`,
`?` or `+`, as in argparse). `headway serve` reads it to say which flags are vLLM's, and to pass them on.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

FILE = Path(__file__).resolve().parents[1] / "src" / "headway" / "cli" / "data" / "vllm_flags.json"


def installed_flags() -> dict[str, str]:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    flags = {}
    for action in make_arg_parser(FlexibleArgumentParser())._actions:
        if not isinstance(action, argparse._HelpAction):
            values = "1" if action.nargs is None else str(action.nargs)
            flags |= dict.fromkeys(action.option_strings, values)
    return flags


def main() -> int:
    import vllm

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit 1 when the file differs from the installed vLLM")
    check = parser.parse_args().check
    version = vllm.__version__.partition("+")[0]
    text = json.dumps({"version": version, "flags": installed_flags()}, indent=0, sort_keys=True) + "\n"
    if check:
        return int(FILE.read_text() != text)
    FILE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
