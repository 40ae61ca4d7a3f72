"""Progress bars of load runs and of simulations."""

from __future__ import annotations

from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


def terminal_bar(text: str) -> Progress:
    """Return a progress bar on stderr that vanishes at its end; without a terminal it draws nothing."""
    console = Console(stderr=True)
    return Progress(
        TextColumn(text),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )


class StepBar:
    """A bar that appears with its first step. A context manager, called with the steps done, and all."""

    def __init__(self, text: str, *, shown: bool = True) -> None:
        """shown: False: nothing is drawn."""
        self._bar = terminal_bar(text)
        self._shown = shown
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._task is not None:
            self._bar.stop()

    def __call__(self, done: int, total: int) -> None:
        if not self._shown:
            return
        if self._task is None:
            self._bar.start()
            self._task = self._bar.add_task("", total=total)
        self._bar.update(self._task, completed=done, total=total)


class _CountBar:
    """A bar of what has ended, on stderr if that is a terminal. A context manager."""

    def __init__(self, text: str, total: int | None, words: str = "") -> None:
        """text: the column before the bar. total: None: known only at the end."""
        self._bar = terminal_bar(text)
        self._task = self._bar.add_task(words, total=total)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()


class LoadProgress(_CountBar):
    """Progress of a load run: answered, open, failed."""

    def __init__(self, total: int) -> None:
        self._open = self._failed = 0
        super().__init__("{task.description}", total, self._words())

    def _words(self) -> str:
        failed = f", [red]{self._failed} failed[/red]" if self._failed else ""
        return f"{self._open} open{failed}"

    def sent(self) -> None:
        """Count a request that was sent."""
        self._open += 1
        self._bar.update(self._task, description=self._words())

    def done(self, ok: bool) -> None:
        """Count a request that has ended."""
        self._open -= 1
        self._failed += not ok
        self._bar.update(self._task, advance=1, description=self._words())


class RunProgress(_CountBar):
    """Number of simulations done."""

    def __init__(self, total: int | None) -> None:
        """total: None: how many there will be is known only at the end."""
        super().__init__("simulating {task.description}", total)

    def done(self, name: str = "") -> None:
        """Count a simulation that has ended. name: what it simulated."""
        self._bar.update(self._task, advance=1, description=name)
