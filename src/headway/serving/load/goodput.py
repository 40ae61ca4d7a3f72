"""Objectives on the command line: `ttft:500 tbt:100 long.ttft:30000`, in milliseconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from headway.core.errors import ConfigError
from headway.sim.metrics import NO_TARGETS, SloTargets

_FIELDS = {"ttft": "ttft_s", "tbt": "tbt_s", "tpot": "tpot_s", "e2e": "e2e_s", "e2el": "e2e_s"}


class GoodputTargets:
    """Objectives by class. An objective without a class applies to all classes that have no value of their own."""

    def __init__(self, items: Sequence[str]) -> None:
        self._given: dict[str, SloTargets] = {}
        for item in items:
            left, colon, milliseconds = item.partition(":")
            # From the right: the name of a class may itself have dots.
            klass, _, name = left.rpartition(".")
            try:
                value = float(milliseconds)
            except ValueError:
                # Refused below, with the same message as any other value that is not above 0.
                value = -1.0
            if not colon or name not in _FIELDS or not 0 < value < float("inf"):
                raise ConfigError(
                    f"--goodput {item!r}: write [CLASS.]METRIC:MILLISECONDS, METRIC one of {', '.join(_FIELDS)}"
                )
            base = self._given.get(klass, NO_TARGETS)
            self._given[klass] = replace(base, **{_FIELDS[name]: value / 1000})

    @property
    def classes(self) -> list[str]:
        """Classes that objectives name."""
        return [klass for klass in self._given if klass]

    def of(self, klass: str) -> SloTargets:
        """Return the objectives of requests of a class."""
        common, own = self._given.get("", NO_TARGETS), self._given.get(klass, NO_TARGETS)
        names = ("ttft_s", "tbt_s", "tpot_s", "e2e_s")
        return SloTargets(**{n: getattr(common, n) if getattr(own, n) is None else getattr(own, n) for n in names})

    def to_json(self) -> dict[str, dict[str, float]]:
        """Return class (`*`: all) → objective → seconds."""
        names = ("ttft_s", "tbt_s", "tpot_s", "e2e_s")
        return {
            klass or "*": {n: getattr(slo, n) for n in names if getattr(slo, n) is not None}
            for klass, slo in self._given.items()
        }
