"""Terminal output: progress goes to stderr, results to stdout."""

from __future__ import annotations

from rich.console import Console, RenderableType


def say(line: str) -> None:
    """Print a line of progress, with rich's markup, on stderr."""
    Console(stderr=True, highlight=False).print(line, soft_wrap=True)


def show(thing: RenderableType) -> None:
    """Print a result on stdout; the width is large enough not to cut columns."""
    console = Console(highlight=False)
    # A table that is wider than the terminal is not squeezed: the terminal wraps its lines, and no name is cut.
    wide = Console(highlight=False, width=1000)
    needed = wide.measure(thing).maximum
    if not console.is_terminal:
        needed = max(needed, 140)
    if needed > console.width:
        console = Console(highlight=False, width=min(needed, 1000))
    console.print(thing)
