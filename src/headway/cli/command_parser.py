"""The parser of all commands: flags are given in full, and what is wrong is said in one line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, NoReturn


class CommandParser(argparse.ArgumentParser):
    """`argparse`'s parser without abbreviations: one that is unambiguous today names another flag after the next
    release. Subcommands get parsers of the same class."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        """Exit with status 2 and one line; the usage of some commands would fill a screen."""
        self.exit(2, f"{self.prog}: error: {message} (`{self.prog} --help` lists what there is)\n")

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """Exit because of arguments that no flag takes, naming the flags that are spelt alike."""
        hints = []
        for word in unknown:
            flag = word.partition("=")[0]
            close = get_close_matches(flag, self._option_string_actions, 1, 0.7) if flag.startswith("--") else []
            hints += [f"{flag}: did you mean {close[0]}?" for _ in close]
        self.error(f"unrecognized arguments: {' '.join(unknown)}" + "".join(f"; {hint}" for hint in hints))
