"""Argument types of argparse shared by several commands."""

from __future__ import annotations

import argparse

from headway.core.errors import ConfigError
from headway.sim.workload.specs import parse_tokens


def tokens(text: str) -> int:
    """Parse a count of tokens of at least 1: `200`, `32K`, `1M` (powers of ten)."""
    try:
        return parse_tokens(text)
    except ConfigError as problem:
        raise argparse.ArgumentTypeError(str(problem)) from None
