"""Classes of requests that settings name: one that the workload cannot have is refused, not ignored."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from headway.core.errors import ConfigError
from headway.sim.workload.trace_request import TraceRequest


def final_classes(names: Iterable[str]) -> set[str]:
    """Return what `transforms.classify` makes of classes: requests without a name become `short` or `long`."""
    given = set(names)
    return (given - {""}) | ({"short", "long"} if "" in given else set())


def check_classes(
    setting: str,
    names: Iterable[str],
    requests: Iterable[TraceRequest],
    declared: Callable[[], set[str]],
    also: str = "",
) -> list[str]:
    """Return the classes that no request has. Raises ConfigError for one that the workload cannot have.

    setting: what errors say before the class. declared: returns the workload's classes; asked only where no request has
    the class, as it may read a trace. also: what errors say after the classes that there are."""
    drawn = {request.klass for request in requests}
    missing = [name for name in names if name not in drawn]
    known = drawn | declared() if missing else drawn
    for name in missing:
        if name not in known:
            raise ConfigError(
                f"{setting}{name}: the workload has no such class; it has {', '.join(sorted(known))}{also}"
            )
    return missing
