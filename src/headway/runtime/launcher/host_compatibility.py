"""What the hosts of an instance, or of a cluster, must agree on, and what each contributes. No torch."""

from __future__ import annotations

import secrets
from pathlib import Path

from headway import __version__
from headway.core.cpu_affinity import CORES
from headway.core.errors import ConfigError, HeadwayError
from headway.perf.hardware.memory import available_bytes
from headway.perf.latency.layout import ParallelLayout
from headway.runtime.launcher.host_messages import PROTOCOL, HostHello
from headway.runtime.model.identity import identity

CLUSTER = "a cluster"
"""In place of a layout where hosts run whole instances."""


def terms(node: int, nodes: int, layout: ParallelLayout, model: str) -> HostHello:
    """This host's own. Raises ConfigError when the ranks cannot be spread so."""
    check_nodes(nodes, layout)
    return _terms(node, nodes, layout.name, identity(Path(model)))


def cluster_terms(node: int, nodes: int, model: str) -> HostHello:
    """This host's own, to run whole instances of a cluster. One that has not got the model says so to node 0, that its
    operator hears of it too; node 0 itself raises CheckpointError."""
    try:
        return _terms(node, nodes, CLUSTER, identity(Path(model)))
    except HeadwayError as error:
        if node == 0:
            raise
        return _terms(node, nodes, CLUSTER, "", str(error))


def _terms(node: int, nodes: int, layout: str, model: str, trouble: str = "") -> HostHello:
    return HostHello(
        protocol=PROTOCOL,
        version=__version__,
        node=node,
        nodes=nodes,
        run=secrets.token_hex(8),
        layout=layout,
        model=model,
        cores=len(CORES),
        available_bytes=available_bytes(),
        trouble=trouble,
    )


def check_nodes(nodes: int, layout: ParallelLayout) -> None:
    """Every host has as many ranks as every other. Raises ConfigError otherwise."""
    if layout.accelerators % nodes:
        raise ConfigError(
            f"{layout.name} has {layout.accelerators} workers, which cannot be spread evenly over --nnodes {nodes}"
        )


def node_of(rank: int, nodes: int, layout: ParallelLayout) -> int:
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
        return f"it was started for {theirs.layout}, and node 0 for {mine.layout}: give the same command on all hosts"
    if theirs.trouble:
        return theirs.trouble
    if theirs.model != mine.model:
        return f"its model folder holds another model ({theirs.model}) than node 0's ({mine.model})"
    return None
