"""Which host a rank is on, by which interface a host is reached, and what makes two folders the same model."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import CheckpointError, ConfigError
from headway.runtime.embedded import model_path
from headway.runtime.engine.config import EngineConfig
from headway.runtime.launcher.processes import address_towards, interface_of, new_token
from headway.runtime.launcher.ray_hosts import node_of
from headway.runtime.model.config import identity


@given(tp=st.integers(1, 8), stages=st.integers(1, 8), kvp=st.integers(1, 4), nodes=st.integers(2, 12))
def test_every_host_has_as_many_ranks_in_order_or_it_is_an_error(tp: int, stages: int, kvp: int, nodes: int) -> None:
    ranks = tp * stages * kvp

    def config() -> EngineConfig:
        return EngineConfig(
            model="m",
            tensor_parallel_size=tp,
            pipeline_parallel_size=stages,
            kv_parallel_size=kvp,
            nnodes=nodes,
            ray_address="auto",
        )

    if ranks % nodes:
        with pytest.raises(ConfigError, match=f"nnodes {nodes}"):
            config()
        return
    config()
    where = [node_of(rank, nodes, ranks) for rank in range(ranks)]
    assert where == [node for node in range(nodes) for _ in range(ranks // nodes)]


def test_the_loopback_is_reached_through_itself() -> None:
    assert address_towards("127.0.0.1") == "127.0.0.1"
    name = interface_of("127.0.0.1")
    assert name is not None
    assert Path(f"/sys/class/net/{name}").exists()
    assert interface_of("203.0.113.9") is None


def test_every_token_is_another() -> None:
    assert len({new_token() for _ in range(10)}) == 10
    assert len(new_token()) >= 32


def test_other_weights_of_the_same_shape_are_another_model(tmp_path: Path) -> None:
    model, copy = model_path(), tmp_path / "copy"
    shutil.copytree(model, copy)
    assert identity(copy) == identity(model)
    weights = next(copy.glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[len(data) // 2 :] = bytes(byte ^ 1 for byte in data[len(data) // 2 :])
    weights.write_bytes(data)
    assert identity(copy) != identity(model)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        identity(tmp_path)
