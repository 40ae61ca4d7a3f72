"""`cluster.yaml`: which model, how many instances of it, and which placement policy stands before them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from headway.core.errors import ConfigError
from headway.placement.registry import check_options, names
from headway.placement.view import Role

LIVE = ("jsq", "fifo", "priority", "reservation")
"""Policies that can place whole requests on single instances, which is what live instances compute so far."""


class Pool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`count` equal instances on one node; `serve`: their own settings, as of `headway serve`, over the file's."""

    count: int = 1
    role: Role = "mixed"
    serve: dict[str, Any] = {}


class ClusterFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """model: a checkpoint's folder, None for the embedded one; serve: settings of `headway serve` for everybody."""

    pools: tuple[Pool, ...]
    model: str | None = None
    placement: str = "jsq"
    options: dict[str, Any] = {}
    serve: dict[str, Any] = {}


def cluster_file(data: Any, where: str) -> ClusterFile:
    """Check what a file says. ConfigError names the field and what is allowed."""
    try:
        made = msgspec.convert(data, ClusterFile)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error} (fields: {', '.join(ClusterFile.__struct_fields__)})") from None
    if not made.pools:
        raise ConfigError(f"{where}: pools is empty: name at least one, such as `- {{count: 2}}`")
    for i, pool in enumerate(made.pools):
        if not 1 <= pool.count <= 1024:
            raise ConfigError(f"{where}: pools[{i}].count must be between 1 and 1024, not {pool.count}")
        if pool.role != "mixed":
            raise ConfigError(
                f"{where}: pools[{i}].role {pool.role!r}: live instances do prefill and decode (role mixed); "
                "prefill and decode instances are simulated only so far"
            )
    _check_placement(made, where)
    return made


def _check_placement(file: ClusterFile, where: str) -> None:
    if file.placement not in names():
        raise ConfigError(f"{where}: unknown placement {file.placement!r}; live clusters know {', '.join(LIVE)}")
    if file.placement not in LIVE:
        raise ConfigError(
            f"{where}: placement {file.placement!r} moves KV between instances or spreads prompts over several, "
            f"which is simulated only so far (`headway simulate`); live clusters know {', '.join(LIVE)}"
        )
    options = file.options if file.placement == "jsq" else {"long_sp": 1, **file.options}
    if options.get("long_sp", 1) != 1:
        raise ConfigError(
            f"{where}: options.long_sp is {options['long_sp']}: a live instance computes prompts alone; it must be 1"
        )
    try:
        check_options(file.placement, options)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def placement_options(file: ClusterFile) -> dict[str, Any]:
    """The policy's options, with groups of one."""
    return dict(file.options) if file.placement == "jsq" else {"long_sp": 1, **file.options}


def model_of(file: ClusterFile, folder: Path) -> str | None:
    """The checkpoint's folder; a relative one is beside the file."""
    return None if file.model is None else str(folder / file.model)
