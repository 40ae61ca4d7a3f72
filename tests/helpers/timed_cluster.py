"""A cluster of timed instances from a scenario file: the live router and messages, and what the simulator goes by."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headway.core.errors import ConfigError
from headway.core.strict_yaml import read_yaml
from headway.policy.placement.registry import make_placement
from headway.runtime.assembly.instances import launcher
from headway.runtime.cluster.client import ClusterClient, ClusterRules
from headway.runtime.cluster.instances import LiveInstance
from headway.runtime.engine.config import EngineConfig
from headway.runtime.engine.protocol import EngineInfo
from headway.sim.build import requests_of
from headway.sim.cluster.build import cluster_of
from headway.sim.cluster.state import ClusterSpec
from headway.sim.scenario import Scenario, parse_scenario

_PROCESS = "tests.helpers.timed_engine_process"


def scenario_of(file: Path) -> Scenario:
    """A scenario with a placement. Raises ConfigError."""
    scenario = parse_scenario(read_yaml(str(file)), str(file))
    if scenario.cluster.placement is None:
        raise ConfigError(f"{file}: cluster.placement is missing: it names the policy")
    return scenario


def spec_of(scenario: Scenario) -> ClusterSpec:
    """Its cluster."""
    return cluster_of(scenario, requests_of(scenario.workload, scenario.run.window_s, scenario.run.seeds[0]))


def timed_cluster(file: Path, folder: Path) -> ClusterClient:
    """One process an instance, already starting. `folder`: for their sockets; its path must be short."""
    scenario = scenario_of(file)
    spec = spec_of(scenario)
    config = EngineConfig(model=str(file.resolve()), worker_timeout_s=60.0)
    instances = [
        LiveInstance(
            each.id, each.role, each.node, 0, config, launcher(each.id, folder, "tests.helpers.timed_engine_process")
        )
        for each in spec.instances
    ]
    name = str(scenario.cluster.placement)

    def rules(infos: Sequence[EngineInfo]) -> ClusterRules:
        return ClusterRules(
            policy=lambda: make_placement(name, spec.policy_context, scenario.cluster.options),
            latency=spec.spans,
            shape=spec.shape,
            rows=spec.rows,
        )

    return ClusterClient(instances, spec.links, rules, placement=name, backends=spec.backends)
