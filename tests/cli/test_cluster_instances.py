"""Host and node of each instance, and its share of the host's resources."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headway.core.errors import ConfigError, RequestError
from headway.runtime.assembly import cluster as instances
from headway.runtime.assembly.cluster import InstanceFactory, links
from headway.runtime.cluster.cluster_file import ClusterFile, cluster_file, nodes_of
from headway.runtime.engine.config import EngineConfig
from headway.serving.serve_settings import ServeSettings, instance_configs


def file_of(*pools: dict[str, Any], **fields: Any) -> ClusterFile:
    return cluster_file({"pools": list(pools), **fields}, "file")


@pytest.mark.parametrize(
    ("pools", "nodes"),
    [
        ([{"count": 3}], [0, 0, 0]),
        ([{"count": 4, "per_node": 2}], [0, 0, 1, 1]),
        ([{}, {"count": 4, "per_node": 2}], [0, 1, 1, 2, 2]),
        ([{"count": 2}, {"count": 2, "host": 1}, {}], [0, 0, 1, 1, 0]),
        ([{"count": 2, "host": 1}, {"host": 2}], [0, 0, 1]),
        ([{"host": 2}, {"count": 2, "host": 1, "per_node": 1}, {}], [1, 2, 3, 0]),
    ],
)
def test_hosts_are_nodes_unless_a_pool_says_otherwise(pools: list[dict[str, Any]], nodes: list[int]) -> None:
    assert nodes_of(file_of(*pools)) == nodes


def test_cores_and_memory_are_shared_out_host_by_host() -> None:
    file = file_of({"count": 2}, {"count": 4, "host": 1}, {"host": 1, "serve": {"threads": 3}})
    settings = ServeSettings(ray_address="a")  # type: ignore[call-arg]
    configs = instance_configs(file, "file", "m", settings, (8, 20))
    assert [config.threads for config in configs] == [4, 4, 4, 4, 4, 4, 3]
    assert [config.memory_share for config in configs] == [0.5] * 2 + [0.2] * 5
    assert {config.nnodes for config in configs} == {1}


def test_instances_cache_prefixes() -> None:
    def cached(**serve: Any) -> list[bool]:
        file = file_of({}, {"serve": {"kv_parallel_size": 2}}, {"serve": serve})
        return [config.prefix_cache for config in instance_configs(file, "file", "m", ServeSettings())]  # type: ignore[call-arg]

    assert cached() == [True, False, True]
    assert cached(prefix_cache=False) == [True, False, False]
    # A replay of one instance's log knows nothing of KV that others hand over.
    logged = instance_configs(file_of({}), "file", "m", ServeSettings(event_log="log"))  # type: ignore[call-arg]
    assert not logged[0].prefix_cache


@pytest.mark.parametrize(
    "setting", [{"api_key": "secret"}, {"host": "0.0.0.0"}, {"log-level": "debug"}, {"journal": "j"}, {"nnodes": 2}]
)
def test_endpoint_settings_are_refused_in_a_pool(setting: dict[str, Any]) -> None:
    file = file_of({}, {"serve": {"threads": 1, **setting}})
    words = rf"file: pools\[1\].serve.{next(iter(setting))}: say that for all of the cluster, in its serve:"
    with pytest.raises(ConfigError, match=words):
        instance_configs(file, "file", "m", ServeSettings())  # type: ignore[call-arg]


def test_a_pool_gets_no_more_instances_than_a_file_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    class Made:
        def __init__(self, number: int, role: str, node: int, pool: int, *_: object) -> None:
            self.number, self.pool, self.state = number, pool, "ready"

    monkeypatch.setattr(instances, "LiveInstance", Made)
    monkeypatch.setattr(instances, "LARGEST_POOL", 3)
    file, config = file_of({"count": 2}, {}), EngineConfig(model="m")
    factory = InstanceFactory(file, [config] * 3, Path("folder"), {})
    there = factory.start_all()
    there.append(factory.start_another(3, 0, 0, None))
    factory.start_another(4, 1, 0, None)
    with pytest.raises(RequestError, match="pool 0 has 3 instances, which is as many as a pool may have"):
        factory.start_another(5, 0, 0, None)
    there[1].state = "left"
    assert factory.start_another(1, 0, 1, None).number == 1
    with pytest.raises(RequestError, match="pool 0 has 3 instances"):
        factory.start_another(5, 0, 0, None)
    factory.start_another(3, 0, 1, None)  # in the place of one that failed and was taken off the list


def test_links_between_hosts_are_no_faster_than_the_network() -> None:
    alone = links(file_of({"count": 2}))
    assert alone.inside == alone.across
    apart = links(file_of({}, {"host": 1}, network_gbit_s=1.0))
    assert apart.inside == alone.inside
    assert apart.across.bytes_per_s == 125e6
    assert links(file_of({}, {"host": 1}, network_gbit_s=400)).across.bytes_per_s == alone.inside.bytes_per_s


def test_an_unknown_kv_connector_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"file: kv_connector 'mooncake': must be one of auto, nixl, peers"):
        file_of({}, kv_connector="mooncake")
    monkeypatch.setattr("headway.runtime.kv_transfer.connector.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"kv_connector 'nixl': .* pip install 'headway\[nixl\]'"):
        file_of({}, kv_connector="nixl")
    monkeypatch.undo()
    assert file_of({}).kv_connector == "auto"
