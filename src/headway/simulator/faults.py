"""The fault explorer: a seeded world that is as unkind to a scheduler as it can be, and checks it after every step."""

from __future__ import annotations

from collections.abc import Callable, Iterable


def explore(seeds: Iterable[int], say: Callable[[str], None]) -> int:
    """Run every seed; say what failed. 0 when none did."""
    raise NotImplementedError
