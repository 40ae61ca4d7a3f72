"""Several hosts: node 0's coordinator, and the agents that `--node-rank R` runs on the other hosts."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from headway.core.errors import ConfigError
from headway.runtime.engine.config import EngineConfig

if TYPE_CHECKING:
    from headway.runtime.launcher.host_agent import ProcessLauncher
    from headway.runtime.launcher.host_coordinator import HostCoordinator
    from headway.runtime.launcher.host_messages import HostHello


def check_node(nnodes: int, node: int) -> None:
    """Raise ConfigError unless 0 <= `node` < `nnodes`."""
    if nnodes < 1 or not 0 <= node < nnodes:
        raise ConfigError(f"node-rank must be from 0 to nnodes - 1, not {node} of {nnodes}")


def settle_token(config: EngineConfig, node: int, instances: bool = False) -> EngineConfig:
    """Validate the settings of several hosts; return them with a new token where node 0 was given none.

    instances: each host runs whole instances of a cluster, instead of a share of one engine's workers. Prints the
    command for the other hosts along with a new token. Raises ConfigError.
    """
    check_node(config.nnodes, node)
    if config.nnodes == 1:
        return config
    from headway.runtime.launcher.host_compatibility import check_nodes
    from headway.runtime.launcher.network import parse_endpoint
    from headway.runtime.launcher.secret import check_token, new_token

    if config.rdzv_endpoint is None:
        raise ConfigError("several hosts need --rdzv-endpoint HOST:PORT, an address of node 0 that all can reach")
    endpoint = parse_endpoint(config.rdzv_endpoint)
    # Instances of a cluster are placed by the cluster file; workers of one engine must divide evenly.
    if not instances:
        check_nodes(config.nnodes, config.layout)
    if config.rdzv_timeout_s <= 0.0:
        raise ConfigError(f"rdzv-timeout must be more than 0 seconds, not {config.rdzv_timeout_s:g}")
    if config.rdzv_token is not None:
        check_token(config.rdzv_token)
        return config
    if node:
        raise ConfigError("set HEADWAY_RDZV_TOKEN to node 0's token: it prints the one that it makes")
    # Only node 0 gets here: the token must be the same on all hosts.
    token = new_token()
    print(
        f"headway: start the other hosts with the same command, --node-rank 1 to {config.nnodes - 1}, --rdzv-endpoint "
        f"{endpoint} and HEADWAY_RDZV_TOKEN={token}",
        file=sys.stderr,
        flush=True,
    )
    return msgspec.structs.replace(config, rdzv_token=token)


def run_host(config: EngineConfig, node: int) -> int:
    """Run this host's workers of one engine, until node 0 ends or a signal arrives.

    Raises ConfigError when node 0 refuses this host.
    """
    from headway.core.structured_log import setup
    from headway.runtime.engine.numerics import settle
    from headway.runtime.launcher.host_compatibility import terms
    from headway.runtime.launcher.rank_launcher import RankLauncher

    settle()
    setup(config.log_level, config.log_format)
    layout = config.layout
    mine = terms(node, config.nnodes, layout, config.model)
    return _run(config, mine, RankLauncher(config.model, config.threads, mine, layout))


def run_cluster_host(config: EngineConfig, node: int, model: str | None) -> int:
    """Run the instances of a cluster that node 0 starts on this host, until node 0 ends or a signal arrives.

    model: this host's copy of the checkpoint, None for the embedded one. Raises ConfigError like `run_host`.
    """
    from headway.core.structured_log import setup
    from headway.runtime.launcher.engine_starter import EngineLauncher
    from headway.runtime.launcher.host_compatibility import cluster_terms
    from headway.runtime.launcher.network import parse_endpoint, resolve

    setup(config.log_level, config.log_format)
    if model is None:
        from headway.runtime.embedded import model_path

        model = str(model_path())
    mine = cluster_terms(node, config.nnodes, model)
    if mine.trouble:
        logging.getLogger("headway.host").error("no instance can run here: %s", mine.trouble)
    assert config.rdzv_endpoint is not None
    return _run(config, mine, EngineLauncher(model, resolve(parse_endpoint(config.rdzv_endpoint).host)))


def open_coordinator(config: EngineConfig, host_of: Callable[[int], int]) -> HostCoordinator:
    """Open node 0's coordinator of a cluster's hosts. host_of: returns the host of an instance number."""
    from headway.runtime.launcher.host_compatibility import cluster_terms
    from headway.runtime.launcher.host_coordinator import HostCoordinator
    from headway.runtime.launcher.network import parse_endpoint

    assert config.rdzv_endpoint is not None
    assert config.rdzv_token is not None
    mine = cluster_terms(0, config.nnodes, config.model)
    endpoint = parse_endpoint(config.rdzv_endpoint)
    return HostCoordinator(endpoint, config.rdzv_token, mine, host_of, config.rdzv_timeout_s)


def _run(config: EngineConfig, mine: HostHello, starter: ProcessLauncher) -> int:
    """Run a host agent until node 0 ends or a signal arrives; return the exit status."""
    from headway.runtime.launcher.host_agent import HostAgent
    from headway.runtime.launcher.network import parse_endpoint

    assert config.rdzv_endpoint is not None
    assert config.rdzv_token is not None
    endpoint = parse_endpoint(config.rdzv_endpoint)
    host = HostAgent(endpoint, config.rdzv_token, mine, starter, config.rdzv_timeout_s)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: host.end())
    host.run()
    return 0
