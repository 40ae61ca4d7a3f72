"""A file of `headway cluster` as a scenario, simulated with the times of this machine."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from headway.core.errors import ConfigError
from headway.core.settings import resolve
from headway.perf.latency.groups import GroupShape
from headway.runtime.cluster.cluster_file import ClusterFile, cluster_file, first_of, model_of, workload_of
from headway.runtime.engine.config import EngineConfig, settle
from headway.serving.launch import model_folder
from headway.serving.serve_settings import ServeSettings, instance_configs, shared_cores
from headway.sim.cluster.state import ClusterSpec
from headway.sim.scenario import ClusterSection, MemorySection, ModelSection, PoolSection, PrefixCacheSection, Scenario
from headway.sim.sweep import ParsedScenario

if TYPE_CHECKING:
    from headway.runtime.assembly.cluster import InstanceMeasurement

REQUESTS = 300
"""Simulated requests of a file without a `workload`."""
LOAD = 0.5
"""Their load: the share of time that the instances that prefill would be busy, were every prompt computed by one."""
LONG_EVERY = 10
"""One of their prompts in as many is long."""
OUTPUT = 64
"""Tokens of each one's output."""


class ClusterScenarios:
    """Makes scenarios of a cluster file's data. One engine of each distinct configuration is loaded, once."""

    def __init__(self, path: Path, environment: Mapping[str, str]) -> None:
        """path: of the file, beside which its model is looked up; environment: variables, of which HEADWAY_… are
        settings."""
        settle()
        self._path = path
        self._environment = environment
        self._measured: dict[bytes, InstanceMeasurement] = {}
        self._warned: set[str] = set()

    def parse(self, data: Mapping[str, Any], where: str) -> ParsedScenario:
        """Validate the data, measure what is new, and return the scenario with its instances. Raises ConfigError."""
        # Engines need the extra `serve`.
        from headway.runtime.assembly.cluster import cluster_plan
        from headway.runtime.assembly.engine import named_profile

        file = cluster_file(data, where)
        if file.behind_http:
            raise ConfigError(
                f"{where}: pools of backend vllm have their own engines, which are not measured here: simulate them "
                "by a scenario with `engine: vllm` (examples/vllm-convoy.yaml) and `cluster.pools`"
            )
        settings = resolve(ServeSettings, environment=self._environment, file=file.serve, origin=f"{where}: serve")
        model = model_folder(model_of(file, self._path.parent))
        configs = instance_configs(file, where, model, settings)
        # A profile that the file names may be of a machine with more cores.
        if all(named_profile(config) is None for config in configs):
            self._warn(shared_cores(file, configs))
        pools = zip(file.pools, first_of(file), strict=True)
        measured = [self._measure(configs[first]) for pool, first in pools for _ in range(pool.count)]
        cluster = cluster_plan(file, model, configs, measured).cluster
        return ParsedScenario(_scenario(file, cluster, self._path.stem, where), cluster)

    def _measure(self, config: EngineConfig) -> InstanceMeasurement:
        from headway.runtime.assembly import dry_run
        from headway.runtime.assembly.cluster import measurement

        config = msgspec.structs.replace(config, event_log=None)
        key = msgspec.json.encode(config)
        if key not in self._measured:
            self._measured[key] = measurement(dry_run.loaded_instance(config), config)
        return self._measured[key]

    def _warn(self, sentences: list[str]) -> None:
        for sentence in sentences:
            if sentence not in self._warned:
                self._warned.add(sentence)
                print(f"warning: {sentence}", file=sys.stderr)


def _scenario(file: ClusterFile, cluster: ClusterSpec, name: str, where: str) -> Scenario:
    """Return the scenario's sections. Those of hardware and latencies stay unset: `cluster` has what was measured."""
    caches = [engine.prefix_cache for engine in cluster.engines if engine.prefix_cache is not None]
    first = iter(first_of(file))
    pools = []
    for pool in file.pools:
        i = next(first)
        instance, kvp = cluster.instances[i], cluster.engines[i].config.kv_parallel
        cut = {"tp": instance.tp, "stages": instance.stages, "kvp": kvp, "kv_tokens": instance.capacity // kvp}
        pools.append(PoolSection(role=pool.role, count=pool.count, **cut))
    return Scenario(
        name=name,
        about="A cluster file, with instances measured on this machine.",
        cluster=ClusterSection(
            placement=file.placement,
            options=file.options,
            pools=tuple(pools),
            backends=file.backends,
            sends_layers=False,
            span_rows=file.span_rows,
        ),
        model=ModelSection(**{name: getattr(cluster.shape, name) for name in ModelSection.model_fields}),
        memory=MemorySection(block_tokens=cluster.engines[0].block_tokens),
        prefix_cache=PrefixCacheSection.model_validate({"eviction": caches[0].eviction}) if caches else None,
        workload=workload_of(file, _traffic(cluster), where),
        slo=file.slo,
        run=file.run,
    )


def _traffic(cluster: ClusterSpec) -> dict[str, Any]:
    """Return the workload of a file that has none: prompts of 1/64 of the longest length, and of 1/4, at `LOAD`."""
    short, long = max(16, cluster.longest // 64), max(32, cluster.longest // 4)
    alone = GroupShape(1)
    work_s = [cluster.spans.prefill_s(0, tokens, alone) for tokens in (short, long)]
    mean_s = work_s[0] + (work_s[1] - work_s[0]) / LONG_EVERY
    prefilling = sum(each.role != "decode" for each in cluster.instances)
    return {
        "mix": [
            {"class": "short", "share": LONG_EVERY - 1, "prompt": f"fixed:{short}", "output": f"fixed:{OUTPUT}"},
            {"class": "long", "share": 1, "prompt": f"fixed:{long}", "output": f"fixed:{OUTPUT}"},
        ],
        "qps": float(f"{LOAD * prefilling / mean_s:.3g}"),
        "requests": REQUESTS,
    }
