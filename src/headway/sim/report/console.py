"""Terminal output: progress goes to stderr, results to stdout."""

from __future__ import annotations

from rich.console import Console, RenderableType


def say(line: str) -> None:
    """Print a line of progress, with rich's markup, on stderr."""
    Console(stderr=True, highlight=False).print(line, soft_wrap=True)


def show(thing: RenderableType) -> None:
    """Print a result on stdout; in a pipe the width is large enough not to cut columns."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=140)
    console.print(thing)
