"""Every experiment: its id, the function that runs it (imported when it is chosen), and what it shows."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from importlib import import_module

from headway.core.errors import ConfigError
from headway.experiments.base import Options, Report

EXPERIMENTS: dict[str, tuple[str, str]] = {
    "medha.worked-example": ("medha_worked_example:run", "§4.1: three requests under every policy"),
    "medha.eq1": ("chunk_intensity:run", "Eq. 1: arithmetic intensity of a chunk; 40 tokens saturate an H100"),
    "medha.fig3b": ("chunk_attention:medha", "attention time of a 1M prefill by chunk size"),
    "mnemosyne.fig7": ("chunk_attention:mnemosyne", "attention time of a 1M prefill by chunk size"),
}


def names() -> list[str]:
    """All ids, in the papers' order."""
    return list(EXPERIMENTS)


def experiment(name: str) -> Callable[[Options], Report]:
    """The function behind an id; ConfigError names close ids."""
    if name not in EXPERIMENTS:
        close = difflib.get_close_matches(name, EXPERIMENTS, n=4, cutoff=0.4)
        hint = f"did you mean {', '.join(close)}?" if close else "`headway reproduce --list` shows all"
        raise ConfigError(f"no experiment {name!r}; {hint}")
    module, _, function = EXPERIMENTS[name][0].partition(":")
    found: Callable[[Options], Report] = getattr(import_module(f"headway.experiments.{module}"), function)
    return found
