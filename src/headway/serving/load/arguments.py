"""Argument types of argparse shared by several commands."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from headway.core.errors import ConfigError
from headway.sim.workload.specs import parse_tokens


def tokens(text: str) -> int:
    """Parse a count of tokens of at least 1: `200`, `32K`, `1M` (powers of ten)."""
    try:
        return parse_tokens(text)
    except ConfigError as problem:
        raise argparse.ArgumentTypeError(str(problem)) from None


def whole(least: int) -> Callable[[str], int]:
    """Return what parses a whole number of at least `least`."""

    def parse(text: str) -> int:
        if not text.strip().isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return parse
