"""Several hosts, from the settings: node 0's rendezvous, and what `headway serve --node-rank R` does on the others."""

from __future__ import annotations

import signal
import sys

import msgspec

from headway.core.errors import ConfigError
from headway.engine.config import EngineConfig
from headway.server.settings import ServerSettings


def settle_token(config: EngineConfig, node: int) -> EngineConfig:
    """Check what concerns hosts, and make a token where node 0 has none. Raises ConfigError."""
    if config.nnodes < 1 or not 0 <= node < config.nnodes:
        raise ConfigError(f"node-rank must be from 0 to nnodes - 1, not {node} of {config.nnodes}")
    if config.nnodes == 1:
        return config
    from headway.cli.assemble import layout_of
    from headway.parallel.network import parse_endpoint
    from headway.parallel.secret import check_token, new_token
    from headway.parallel.terms import check_nodes

    if config.rdzv_endpoint is None:
        raise ConfigError("several hosts need --rdzv-endpoint HOST:PORT, an address of node 0 that all can reach")
    endpoint = parse_endpoint(config.rdzv_endpoint)
    check_nodes(config.nnodes, layout_of(config))
    if config.rdzv_timeout_s <= 0.0:
        raise ConfigError(f"rdzv-timeout must be more than 0 seconds, not {config.rdzv_timeout_s:g}")
    if config.rdzv_token is not None:
        check_token(config.rdzv_token)
        return config
    if node:
        raise ConfigError("set HEADWAY_RDZV_TOKEN to node 0's token: it prints the one that it makes")
    token = new_token()
    print(
        f"headway: start the other hosts with the same flags, --node-rank 1 to {config.nnodes - 1}, --rdzv-endpoint "
        f"{endpoint} and HEADWAY_RDZV_TOKEN={token}",
        file=sys.stderr,
        flush=True,
    )
    return msgspec.structs.replace(config, rdzv_token=token)


def run_host(config: EngineConfig, node: int, settings: ServerSettings) -> int:
    """Be node `node`, until node 0 ends or we are told to. Raises ConfigError when it does not take us."""
    from headway.cli.assemble import layout_of
    from headway.engine.numerics import settle
    from headway.parallel.network import parse_endpoint
    from headway.parallel.terms import terms
    from headway.server.logging import setup
    from headway.worker.host import Host
    from headway.worker.launch import Ranks

    settle()
    setup(settings.log_level, settings.log_format)
    layout = layout_of(config)
    assert config.rdzv_endpoint is not None
    assert config.rdzv_token is not None
    mine = terms(node, config.nnodes, layout, config.model)
    host = Host(
        parse_endpoint(config.rdzv_endpoint),
        config.rdzv_token,
        mine,
        Ranks(config.model, config.threads, mine, layout),
        config.rdzv_timeout_s,
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: host.end())
    host.run()
    return 0
