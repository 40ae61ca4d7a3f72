"""On what the hosts of an instance must agree, and what each brings. No torch."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from headway import __version__
from headway.core.errors import ConfigError
from headway.hardware.memory import available_bytes
from headway.latency.layout import Layout
from headway.model.identity import identity
from headway.parallel.host_messages import PROTOCOL, HostHello


def terms(node: int, nodes: int, layout: Layout, model: str) -> HostHello:
    """This host's own. Raises ConfigError when the ranks cannot be spread so."""
    check_nodes(nodes, layout)
    return HostHello(
        protocol=PROTOCOL,
        version=__version__,
        node=node,
        nodes=nodes,
        run=secrets.token_hex(8),
        layout=layout.name,
        model=identity(Path(model)),
        cores=len(os.sched_getaffinity(0)),
        available_bytes=available_bytes(),
    )


def check_nodes(nodes: int, layout: Layout) -> None:
    """Every host has as many ranks as every other. Raises ConfigError otherwise."""
    if layout.accelerators % nodes:
        raise ConfigError(
            f"{layout.name} has {layout.accelerators} workers, which cannot be spread evenly over --nnodes {nodes}"
        )


def node_of(rank: int, nodes: int, layout: Layout) -> int:
    """Ranks fill node 0 first, then node 1: those of one stage, which talk most, are together where they can be."""
    return rank * nodes // layout.accelerators


def mismatch(mine: HostHello, theirs: HostHello) -> str | None:
    """Why a host cannot join node 0, whose terms are `mine`; None when it can."""
    if (mine.protocol, mine.version) != (theirs.protocol, theirs.version):
        return f"it runs Headway {theirs.version}, and node 0 {mine.version}: install the same version on all hosts"
    if theirs.nodes != mine.nodes:
        return f"it was started with --nnodes {theirs.nodes}, and node 0 with {mine.nodes}"
    if not 0 < theirs.node < mine.nodes:
        return f"there is no --node-rank {theirs.node} beside node 0 of {mine.nodes} hosts"
    if theirs.layout != mine.layout:
        return f"it was started for {theirs.layout}, and node 0 for {mine.layout}: give the same sizes on all hosts"
    if theirs.model != mine.model:
        return f"its model folder holds another model ({theirs.model}) than node 0's ({mine.model})"
    return None
