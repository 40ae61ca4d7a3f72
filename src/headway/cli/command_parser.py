"""Argument parser of all commands: no abbreviated flags, one-line errors."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, NoReturn


class CommandParser(argparse.ArgumentParser):
    """`argparse.ArgumentParser` without abbreviations, which a later release could make ambiguous.

    Subcommands get parsers of the same class.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **options})
        # Arguments that are being parsed.
        self._words: list[str] = []

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse does; a flag may also be spelt with underscores."""
        self._words = [self._dashed(word) for word in (sys.argv[1:] if args is None else args)]
        return super().parse_known_args(self._words, namespace)

    def _check_value(self, action: Any, value: Any) -> None:
        """As argparse does; but a word after an unknown flag is that flag's value, not a subcommand that is wrong."""
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices and value in self._words:
            flag = self._words[max(0, self._words.index(value) - 1)]
            if flag.startswith("--") and flag not in self._option_string_actions:
                self.refuse([flag, value])
        super()._check_value(action, value)

    def _dashed(self, word: str) -> str:
        """Return a flag that is known with dashes only in that spelling, and any other word unchanged."""
        flag, equals, value = word.partition("=")
        if not word.startswith("--") or flag in self._option_string_actions:
            return word
        dashed = flag.replace("_", "-")
        return dashed + equals + value if dashed in self._option_string_actions else word

    def error(self, message: str) -> NoReturn:
        """Exit with status 2 and one line, without the usage, which fills a screen for some commands."""
        self.exit(2, f"{self.prog}: error: {message} (`{self.prog} --help` lists what there is)\n")

    def refuse(self, unknown: Sequence[str], advice: str = "") -> NoReturn:
        """Exit because of unknown arguments, with suggestions of flags that are spelt alike, and `advice`."""
        hints = []
        shown = [flag for flag, action in self._option_string_actions.items() if action.help is not argparse.SUPPRESS]
        # Only flags get hints; a surplus word could be anything.
        for word in unknown:
            flag = word.partition("=")[0]
            if not flag.startswith("--"):
                continue
            begun = [known for known in shown if len(flag) > 4 and known.startswith(flag)]
            close = begun[:1] or get_close_matches(flag, shown, 1, 0.7)
            hints += [f"{flag}: did you mean {found}?" for found in close]
        self.error(f"unrecognized arguments: {' '.join(unknown)}" + "".join(f"; {hint}" for hint in hints) + advice)
