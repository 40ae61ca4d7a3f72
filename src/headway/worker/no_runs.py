"""An instance of several processes computes no runs: its scheduler takes whole prompts, and its KV moves. No torch."""

from __future__ import annotations

from typing import NoReturn

from headway.core.errors import ConfigError
from headway.core.sampling import SamplingParams

WHY = "an instance of several processes takes no part in runs of a group"


class NoRuns:
    """`member.Computes` that refuses to. Requests whose KV comes here are admitted, and of no concern to it."""

    def admit(self, name: str, prompt: memoryview, params: SamplingParams, output: tuple[int, ...]) -> None:
        """Nothing is kept."""

    def begin(self, *_: object) -> NoReturn:
        """Raises ConfigError."""
        raise ConfigError(WHY)

    def go(self, *_: object) -> NoReturn:
        """As `begin`."""
        raise ConfigError(WHY)

    def finish(self, *_: object) -> NoReturn:
        """As `begin`."""
        raise ConfigError(WHY)

    def saved(self, *_: object) -> NoReturn:
        """As `begin`."""
        raise ConfigError(WHY)

    def whole(self, name: str, tokens: int) -> bool:
        """No KV of runs is here."""
        return False

    def check(self, name: str) -> None:
        """Nobody else takes part."""

    def forget(self, name: str) -> None:
        """Nothing was kept."""

    def __contains__(self, name: str) -> bool:
        return False
