"""`cluster.yaml`: which model, how many instances of it in which roles, and which policy stands before them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from headway.core.errors import ConfigError
from headway.placement.registry import check_options, names
from headway.placement.view import Role

_LARGEST = 1024
_WHOLE = ("jsq", "fifo", "priority", "reservation")
"""Policies that give every request whole to one instance, where `long_sp` is 1."""
_DECODES_APART = ("weave",)


class Pool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`count` equal instances; `serve`: their own settings, as of `headway serve`, over the file's. per_node: how many
    of them the policy is to take for a node; None: they are on one node with all others that do not say."""

    count: int = 1
    role: Role = "mixed"
    serve: dict[str, Any] = {}
    per_node: int | None = None


class ClusterFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """model: a checkpoint's folder, None for the embedded one; serve: settings of `headway serve` for everybody;
    backends: pieces of KV that an instance receives at a time; group_decode: whether a decode on several instances is
    gathered on one, or goes on in place."""

    pools: tuple[Pool, ...]
    model: str | None = None
    placement: str = "jsq"
    options: dict[str, Any] = {}
    serve: dict[str, Any] = {}
    backends: int = 16
    group_decode: Literal["gather", "in-place"] = "gather"


def cluster_file(data: Any, where: str) -> ClusterFile:
    """Check what a file says. ConfigError names the field and what is allowed."""
    try:
        made = msgspec.convert(data, ClusterFile)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error} (fields: {', '.join(ClusterFile.__struct_fields__)})") from None
    if not made.pools:
        raise ConfigError(f"{where}: pools is empty: name at least one, such as `- {{count: 2}}`")
    for i, pool in enumerate(made.pools):
        if not 1 <= pool.count <= _LARGEST:
            raise ConfigError(f"{where}: pools[{i}].count must be between 1 and {_LARGEST}, not {pool.count}")
        if pool.per_node is not None and not 1 <= pool.per_node <= pool.count:
            raise ConfigError(f"{where}: pools[{i}].per_node must be between 1 and its count, not {pool.per_node}")
    if made.backends < 1:
        raise ConfigError(f"{where}: backends must be at least 1, not {made.backends}")
    _check_placement(made, where)
    return made


def _check_placement(file: ClusterFile, where: str) -> None:
    name, roles = file.placement, {pool.role for pool in file.pools}
    if name not in names():
        raise ConfigError(f"{where}: unknown placement {name!r}; known are {', '.join(names())}")
    try:
        check_options(name, file.options)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    if roles == {"decode"}:
        raise ConfigError(f"{where}: pools: all are of role decode; somebody has to prefill (role prefill or mixed)")
    if name == "jsq" and roles != {"mixed"}:
        raise ConfigError(
            f"{where}: jsq gives whole requests to instances of role mixed; pools of other roles do nothing"
        )
    if "decode" not in roles and (name in _DECODES_APART or _disaggregates(file)):
        hint = ", or say `disaggregate: false`" if name == "pecsched" else ""
        raise ConfigError(f"{where}: {name} decodes elsewhere than it prefills: give a pool the role decode{hint}")


def _disaggregates(file: ClusterFile) -> bool:
    return file.placement == "pecsched" and bool(file.options.get("disaggregate", True))


def moves_kv(file: ClusterFile) -> bool:
    """Whether the policy spreads prompts over several instances, or moves KV between them: it needs instances that are
    one process each."""
    if file.placement == "jsq":
        return False
    return file.placement not in _WHOLE or file.options.get("long_sp") != 1


def nodes_of(file: ClusterFile) -> list[int]:
    """The node of each instance, in the order of the pools. 0 is that of all pools without `per_node`."""
    nodes: list[int] = []
    following = 0 if all(pool.per_node is not None for pool in file.pools) else 1
    for pool in file.pools:
        for number in range(pool.count):
            if pool.per_node is None:
                nodes.append(0)
            else:
                nodes.append(following + number // pool.per_node)
        if pool.per_node is not None:
            following += -(-pool.count // pool.per_node)
    return nodes


def model_of(file: ClusterFile, folder: Path) -> str | None:
    """The checkpoint's folder; a relative one is beside the file."""
    return None if file.model is None else str(folder / file.model)
