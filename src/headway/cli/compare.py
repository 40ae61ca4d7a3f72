"""`headway compare FILE`: every policy, or every placement, on one workload, a row each."""

from __future__ import annotations

import argparse
from typing import Any

from headway.cli import simulate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `headway simulate`; `--sweep` combines with what is compared."""
    simulate.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Simulate them all. One that the workload or the cluster does not suit is a row that says why."""
    data, _ = simulate.read(arguments)
    from headway.sim.sweep import parse_sweep

    field, names = alternatives(data)
    more = [parse_sweep(text) for text in arguments.sweep]
    return simulate.simulate(arguments, data, [*more, *([(field, names)] if field not in dict(more) else [])])


def alternatives(data: dict[str, Any]) -> tuple[str, list[Any]]:
    """Return the field that says how a scenario is scheduled, and all of its values."""
    from headway.policy.iteration.ordering import POLICIES
    from headway.policy.placement import registry

    cluster = data.get("cluster")
    if "pools" in data:
        return "placement", registry.names()
    if isinstance(cluster, dict) and "placement" in cluster:
        return "cluster.placement", registry.names()
    if data.get("engine") == "vllm":
        return "vllm.scheduler", ["plugged", "default", "threshold:128", "threshold:512"]
    return "policy.policy", list(POLICIES)
