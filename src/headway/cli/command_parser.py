"""Argument parser of all commands (no abbreviated flags, one-line errors), and lines that fit the terminal."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from headway.core.errors import ConfigError

_FLAG_COLUMNS = 36
"""Columns of a flag and its value in the overview; its text begins after them."""


class _HelpPages(argparse.Action):
    """`--help`: a line a flag; `--help all`: every text; `--help WORD`: the texts that name WORD."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        """Called by argparse. Prints the page and exits."""
        assert isinstance(parser, CommandParser)
        print(parser.help_page(values or ""), end="")
        parser.exit()


class CommandParser(argparse.ArgumentParser):
    """`argparse.ArgumentParser` without abbreviations, which a later release could make ambiguous.

    Subcommands get parsers of the same class. help_pages: `--help` takes a word (`_HelpPages`), for commands with more
    flags than a screen holds.
    """

    def __init__(self, *, help_pages: bool = False, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, "add_help": not help_pages, **options})
        if help_pages:
            text = "this page; `all`: every text in full; WORD: the flags whose texts have this word"
            self.add_argument("-h", "--help", nargs="?", metavar="WORD", action=_HelpPages, help=text)
        # Arguments that are being parsed.
        self._words: list[str] = []

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse does; a flag may also be spelt with underscores."""
        self._words = [self._dashed(word) for word in (sys.argv[1:] if args is None else args)]
        return super().parse_known_args(self._words, namespace)

    def help_page(self, word: str) -> str:
        """Return the overview for no word, every text for `all`, else the texts that have the word.

        Exits with status 2 where none has it."""
        if word == "all":
            return self.format_help()
        shown = [
            (group.title or "", [each for each in group._group_actions if each.help is not argparse.SUPPRESS])
            for group in self._action_groups
        ]
        if not word:
            return self._overview(shown)
        formatter, found = self._get_formatter(), False
        for title, actions in shown:
            texts = {each: f"{title} {' '.join(each.option_strings)} {each.help}".lower() for each in actions}
            named = [each for each in actions if word.lower().lstrip("-") in texts[each]]
            found = found or bool(named)
            formatter.start_section(title)
            formatter.add_arguments(named)
            formatter.end_section()
        if not found:
            self.error(f"no flag has {word!r} in its text")
        return formatter.format_help()

    def _overview(self, groups: Sequence[tuple[str, Sequence[argparse.Action]]]) -> str:
        """Return a line a flag: its name, the first clause of its text, its default."""
        width = shutil.get_terminal_size().columns
        words = "".join(f" [{each.metavar or each.dest}]" for each in self._get_positional_actions())
        lines = [f"usage: {self.prog}{words} [--FLAG VALUE ...]", "", self.description or ""]
        for title, actions in groups:
            lines += ["", f"{title}:"] if actions else []
            for action in actions:
                # A value that may be left out is not shown.
                value = f" {action.metavar}" if action.option_strings and action.nargs not in (0, "?") else ""
                name = (action.option_strings or [str(action.metavar or action.dest)])[-1] + value
                text, _, default = (action.help or "").replace("%%", "%").partition(" (default: ")
                clause = re.split(r"[;:] |(?<!e\.g)\. ", text)[0]
                # A clause of a word or two says nothing without the next.
                text = (clause if len(clause) > 12 else text) + (f" ({default}" if default else "")
                line = f"  {name:<{_FLAG_COLUMNS - 2}} {text}"
                lines.append(line if len(line) <= width else line[: width - 1] + "…")
        lines += ["", "`--help all` prints every text in full, `--help WORD` those that name WORD."]
        return "\n".join(lines) + "\n"

    def _check_value(self, action: Any, value: Any) -> None:
        """As argparse does; but a word after an unknown flag is that flag's value, not a subcommand that is wrong."""
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices and value in self._words:
            flag = self._words[max(0, self._words.index(value) - 1)]
            if flag.startswith("--") and flag not in self._option_string_actions:
                self.refuse([flag, value])
        super()._check_value(action, value)

    def _get_value(self, action: argparse.Action, text: str) -> Any:
        """As argparse does; a type may also raise ConfigError."""
        try:
            return super()._get_value(action, text)
        except ConfigError as error:
            raise argparse.ArgumentError(action, str(error)) from None

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


def hanging(head: str, text: str, width: int = 0) -> str:
    """Return a line of a table of two columns, whose text goes on below itself at the terminal's width, or `width`."""
    width = max(width or shutil.get_terminal_size().columns, len(head) + 20)
    lines = textwrap.wrap(text, width - len(head), break_long_words=False, break_on_hyphens=False)
    return f"\n{' ' * len(head)}".join([head + lines[0], *lines[1:]]) if lines else head.rstrip()


def fitting(text: str) -> str:
    """Return lines that fit the terminal: a longer one goes on below its last column. What is piped stays as it is."""
    width = shutil.get_terminal_size((0, 0)).columns
    if not width:
        return text
    lines = text.splitlines()
    for place, line in enumerate(lines):
        if len(line) > width:
            # Columns are apart by two blanks, or more.
            start = max((found.end() for found in re.finditer(r"  +", line[: width - 20])), default=0)
            lines[place] = hanging(line[:start], line[start:], width)
    return "\n".join(lines)
